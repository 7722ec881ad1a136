"""A package `sglang` that has what is declared of it in `hooks`, and nothing else."""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import cache
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest

from rolloutbus.engine_worker.engines.sglang.upstream.hooks import HOOKS, PARTS, TESTED
from rolloutbus.engine_worker.engines.sglang.upstream.presence import PACKAGE


def hook_targets() -> list[str]:
    return [hook.target for hook in HOOKS]


def part_names() -> list[str]:
    """Of everything that is read or called: "module:Class.name" or "module:name"."""
    found = [
        f"{part.owner}{'.' if ':' in part.owner else ':'}{name.partition('(')[0]}"
        for part in PARTS
        for name in part.names
    ]
    return list(dict.fromkeys(found))


class SglangStandIn:
    """Puts the package where imports find it, for one test."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        without: Collection[str] = (),
        unpatched: str = "",
        renamed: str = "",
        version: str = TESTED[-1],
    ) -> None:
        """
        Args:
            patch: takes the package away again.
            without: what it lacks, as of `hook_targets` and `part_names`.
            unpatched: a target that its registry logs and passes over.
            renamed: a function whose parameters have other names.
            version: what it calls itself.
        """
        self._patch = patch
        self._modules: dict[str, ModuleType] = {}
        self._renamed = renamed
        self.has_run = False
        """Whether its scheduler was started."""
        self._module("").__dict__["__version__"] = version
        for target, parameters in _functions().items():
            self._put(target, self._function(target, parameters))
        for name in part_names():
            if name not in _functions():
                self._put(name, None)
        _Registry.skipped, _Registry.hooks = unpatched, {}
        registry = self._module("srt.plugins.hook_registry")
        registry.__dict__["HookRegistry"] = _Registry
        self._module("srt.plugins").__dict__["load_plugins"] = _Registry.apply_hooks
        self._module("srt.managers.scheduler").__dict__["run_scheduler_process"] = self._run
        self._module("srt.mem_cache.rust_tree_core.mem_cache")
        self._add("xgrammar")
        for name in without:
            self._remove(name)

    def get(self, path: str) -> Any:  # noqa: ANN401
        """What is there now, by "module:Class.name"."""
        module, _, names = path.partition(":")
        value: Any = self._modules[f"{PACKAGE}.{module}"]
        for name in names.split("."):
            value = getattr(value, name)
        return value

    def _run(
        self,
        server_args: object,
        port_args: object,
        tp_rank: int,
        pp_rank: int,
        dp_rank: int | None,
    ) -> None:
        del server_args, port_args, tp_rank, pp_rank, dp_rank
        self.has_run = True

    def _module(self, name: str) -> ModuleType:
        """`sglang.NAME`, and all above it."""
        whole = f"sglang.{name}".rstrip(".")
        parts = whole.split(".")
        for n in range(1, len(parts) + 1):
            self._add(".".join(parts[:n]))
        return self._modules[whole]

    def _add(self, name: str) -> None:
        if name not in self._modules:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            self._modules[name] = module
            self._patch.setitem(sys.modules, name, module)

    def _put(self, path: str, function: Callable[..., Any] | None) -> None:
        module, _, names = path.partition(":")
        *classes, name = names.split(".")
        owner: Any = self._module(f"srt.{module}")
        for each in classes:
            if each not in owner.__dict__:
                setattr(owner, each, type(each, (), {}))
            owner = owner.__dict__[each]
        setattr(owner, name, function or object())

    def _function(self, target: str, parameters: list[str]) -> Callable[..., Any]:
        names = [f"{name}_2" if target == self._renamed else name for name in parameters]
        if "." in target.partition(":")[2]:
            names = ["self", *names]

        def function(*arguments: object, **_: object) -> object:
            return arguments

        signed: Any = function
        signed.__signature__ = Signature(
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return function

    def _remove(self, path: str) -> None:
        module, _, names = path.partition(":")
        *classes, name = names.split(".")
        owner: Any = self._modules[f"{PACKAGE}.{module}"]
        for each in classes:
            owner = getattr(owner, each)
        delattr(owner, name)


class _Registry:
    """As SGLang's: what cannot be patched is passed over."""

    hooks: dict[str, Callable[..., Any]]
    skipped: str

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: object = None) -> None:
        del hook_type
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.hooks.items():
            path, _, name = target.rpartition(".")
            owner = _resolved(path)
            if owner is None or not hasattr(owner, name) or target == cls.skipped:
                continue
            setattr(owner, name, _wrapped(getattr(owner, name), hook))


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: object, **more: object) -> object:
        return hook(original, *arguments, **more)

    wrapper.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
    return wrapper


def _resolved(path: str) -> object | None:
    if path in sys.modules:
        return sys.modules[path]
    above, _, name = path.rpartition(".")
    return getattr(_resolved(above), name, None) if above else None


@cache
def _functions() -> dict[str, list[str]]:
    """Parameters of each function that is patched or called."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for hook in HOOKS:
        found[hook.target] += hook.takes
    for part in PARTS:
        for each in part.names:
            name, is_called, parameters = each.rstrip(")").partition("(")
            if is_called:
                path = f"{part.owner}{'.' if ':' in part.owner else ':'}{name}"
                found[path] += [p for p in parameters.split(", ") if p not in found[path]]
    return dict(found)
