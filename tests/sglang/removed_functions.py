"""SGLang without some of its functions, in the processes of a fleet."""

import os
from pathlib import Path

import pytest

from rolloutbus.engine_worker.engines.sglang.upstream.presence import PACKAGE

REMOVALS = Path(__file__).parent / "removals"


def remove(patch: pytest.MonkeyPatch, *targets: str) -> None:
    """Processes that are started from now on find an SGLang without these: "module:Class.name"."""
    patch.setenv("SGLANG_WITHOUT", ",".join(f"{PACKAGE}.{target}" for target in targets))
    _customize(patch)


def forget_versions(patch: pytest.MonkeyPatch, version: int) -> None:
    """Processes that are started from now on find an SGLang whose steps all say this version."""
    patch.setenv("SGLANG_FORGETS", str(version))
    _customize(patch)


def _customize(patch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("PYTHONPATH", "")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REMOVALS), before])))
