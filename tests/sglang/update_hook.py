"""A hook by which one scheduler of an engine, whichever comes first, fails to take new weights."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMPLAINT = "this scheduler was told to fail"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


def _nothing(*_: object) -> None:
    """What a step costs."""


def hook_of(config: dict[str, str]) -> Callable[[object, Sequence[object], object], None]:
    """What SGLang calls in each step, which does nothing: it is the only way into a scheduler.

    `config`: path of a file; the next scheduler that sees it takes it away, and fails.
    """
    once = Path(config["once"])
    kind: Any = import_module(UPDATER).WeightUpdater
    update = kind.update_weights_from_tensor

    def fail_once(*args: object, **kwargs: object) -> object:
        try:
            once.unlink()
        except FileNotFoundError:
            return update(*args, **kwargs)
        raise RuntimeError(COMPLAINT)

    kind.update_weights_from_tensor = fail_once
    return _nothing
