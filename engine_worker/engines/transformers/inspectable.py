"""What an operator learns of an engine that steps here: its load, a profile."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from rolloutbus.bus.wire.messages.engine import StartProfile
from rolloutbus.engine_worker.engine import EngineBusy
from rolloutbus.engine_worker.engines.shared.step_loop import StepLoop
from rolloutbus.engine_worker.engines.transformers.kv_blocks import KvBlocks

TRACE = "trace.json"


class StepProfiler:
    """Implements `Profiler`: it records the steps and what is done between them."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._record: tuple[Any, Path] | None = None
        """The profiler that records, and where its record goes."""

    def start(self, folder: Path, ask: StartProfile) -> None:
        """See `Profiler`."""
        if self._record is not None:
            raise EngineBusy("a profile is being recorded; send stop_profile first")
        if ask.n_steps:
            raise ValueError("n_steps: this engine records until stop_profile")
        profiler = _profiler(ask)
        # It records the thread that starts it.
        self._loop.call(lambda: _or_busy(profiler.start))
        self._record = (profiler, folder)

    def stop(self) -> None:
        """See `Profiler`."""
        if self._record is None:
            raise EngineBusy("no profile is being recorded; send start_profile first")
        (profiler, folder), self._record = self._record, None
        self._loop.call(lambda: _or_busy(profiler.stop))
        profiler.export_chrome_trace(str(folder / TRACE))


class StepMeter:
    """Implements `LoadMeter`."""

    def __init__(self, loop: StepLoop, blocks: KvBlocks) -> None:
        self._loop = loop
        self._blocks = blocks

    def load(self) -> Mapping[str, float]:
        """See `LoadMeter`."""
        stats = self._loop.stats()
        return {
            "n_running": stats.n_running,
            "n_waiting": stats.n_waiting,
            "n_steps": stats.steps,
            "n_kv_blocks_used": self._blocks.n_used,
            "n_kv_blocks_idle": self._blocks.n_idle,
            "n_kv_blocks_free": self._blocks.n_free,
        }


def _or_busy(act: Callable[[], None]) -> None:
    """A profiler that fails must not take the engine with it."""
    try:
        act()
    except RuntimeError as error:
        raise EngineBusy(f"torch records nothing: {error}") from error


def _profiler(ask: StartProfile) -> Any:  # noqa: ANN401 - untyped
    kinds = cast("Any", torch.profiler.ProfilerActivity)
    known = {"CPU": kinds.CPU}
    if torch.cuda.is_available():
        known["GPU"] = kinds.CUDA
    activities = [known[name] for name in ask.activities if name in known]
    unknown = sorted(set(ask.activities) - {"CPU", "GPU"})
    if unknown or not activities:
        raise ValueError(
            f"activities: {unknown or ask.activities}: this engine has {sorted(known)}"
        )
    return torch.profiler.profile(
        activities=activities, with_stack=ask.with_stack, record_shapes=ask.record_shapes
    )
