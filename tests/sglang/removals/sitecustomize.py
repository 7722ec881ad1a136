"""Takes functions away from SGLang, as a version would in which they have moved.

Found by every Python process with this directory in its PYTHONPATH. `SGLANG_WITHOUT` names the
functions: `package.module:Class.function`, separated by commas. With `SGLANG_FORGETS`, a number,
results of its steps forget the version that they were launched with, and say this one.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

FORGETS = "SGLANG_FORGETS"
RESULTS = "sglang.srt.managers.utils"


class Remover(MetaPathFinder, Loader):
    """Loads modules as they are found elsewhere, and removes from each what it is told."""

    def __init__(self, removed: dict[str, list[str]]) -> None:
        self._removed = removed
        self._loaders: dict[str, Loader] = {}
        self._is_asking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        if self._is_asking or name not in self._removed:
            return None
        self._is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        if module.__name__ == RESULTS and FORGETS in os.environ:
            _forget(module, int(os.environ[FORGETS]))
        for path in self._removed[module.__name__]:
            *classes, name = path.split(".")
            owner: object = module
            for each in classes:
                owner = getattr(owner, each)
            delattr(owner, name)


def _forget(module: ModuleType, version: int) -> None:
    stuck = property(lambda _: version, lambda _, __: None)
    setattr(module.__dict__["GenerationBatchResult"], "rolloutbus_version", stuck)  # noqa: B010 - it has none


def removed() -> dict[str, list[str]]:
    """By module."""
    found: dict[str, list[str]] = {}
    for path in filter(None, os.environ.get("SGLANG_WITHOUT", "").split(",")):
        module, _, names = path.partition(":")
        found.setdefault(module, []).append(names)
    if FORGETS in os.environ:
        found.setdefault(RESULTS, [])
    return found


if removed():
    sys.meta_path.insert(0, Remover(removed()))
