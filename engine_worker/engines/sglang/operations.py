"""What operators ask of a running SGLang: profiles, its load, its weights written to files."""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.control import SaveKind, StartProfile
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.engine_worker.engine import EngineBusy, WeightSink
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.guard import StateGuard
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.shared.checkpoint_writer import (
    copy_description,
    write_checkpoint,
)

ACTIVITIES = ("CPU", "GPU")
"""SGLang has more; those write pickles, or end a scheduler whose machine lacks a tool."""


class Profiling:
    """Implements `Profiler`: the one record that SGLang can make at a time."""

    def __init__(self, thread: EngineThread, *, has_gpu: bool) -> None:
        self._thread = thread
        self._has_gpu = has_gpu
        self._is_recording = False
        self._stops_by_itself = False

    def start(self, folder: Path, ask: StartProfile) -> None:
        """See `Profiler`."""
        if self._is_recording:  # some SGLang would begin anew
            raise EngineBusy("a profile is being recorded; send stop_profile first")
        unknown = sorted(set(ask.activities) - set(ACTIVITIES))
        if unknown:
            raise ValueError(f"activities: {unknown} are none of {', '.join(ACTIVITIES)}")
        activities = [
            a for a in ACTIVITIES if a in ask.activities and (a == "CPU" or self._has_gpu)
        ]
        if not activities:
            raise ValueError("activities: there is nothing to record: this engine has no GPU")
        request = upstream.request(
            "ProfileReq",
            output_dir=str(folder),
            num_steps=ask.n_steps or None,
            activities=activities,
            with_stack=ask.with_stack,
            record_shapes=ask.record_shapes,
        )
        try:
            manager = self._thread.manager
            self._thread.call(lambda: manager.start_profile(request), "start_profile")
        except RuntimeError as error:
            self._thread.check()
            raise EngineBusy(f"SGLang records nothing: {error}") from error
        self._is_recording, self._stops_by_itself = True, bool(ask.n_steps)

    def stop(self) -> None:
        """See `Profiler`."""
        if not self._is_recording:
            raise EngineBusy("no profile is being recorded; send start_profile first")
        self._is_recording = False
        try:
            self._thread.call(self._thread.manager.stop_profile, "stop_profile")
        except RuntimeError as error:
            self._thread.check()
            if not self._stops_by_itself:
                raise EngineBusy(f"SGLang has recorded nothing: {error}") from error


class SchedulerMeter:
    """Implements `LoadMeter`."""

    def __init__(self, thread: EngineThread, more: Callable[[], Mapping[str, float]]) -> None:
        """`more`: gauges of our own."""
        self._thread = thread
        self._more = more

    def load(self) -> Mapping[str, float]:
        """See `LoadMeter`; the schedulers tell nothing while held."""
        loads = self._thread.call(self._thread.manager.get_loads, "get_loads")
        return {**gauges_of({each.dp_rank: each.to_dict() for each in loads}), **self._more()}


def gauges_of(loads: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Every number in the load that each data parallel rank reported, by its path.

    Names of ranks after the first begin with the rank.
    """
    gauges: dict[str, float] = {}
    for rank, load in loads.items():
        prefix = f"dp{rank}." if rank else ""
        gauges.update((prefix + name, value) for name, value in _numbers(load, ""))
    return gauges


def _numbers(load: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for name, value in load.items():
        if isinstance(value, bool | int | float):
            yield path + name, float(value)
        elif isinstance(value, dict):
            yield from _numbers(cast("dict[str, Any]", value), f"{path}{name}.")


class Saving:
    """Implements `Checkpointer`; calls come from any thread but the engine's."""

    def __init__(
        self, thread: EngineThread, guard: StateGuard, weights: WeightSink, model: Path
    ) -> None:
        self._thread = thread
        self._guard = guard
        self._weights = weights
        self._model = model
        self._lock = threading.Lock()
        """SGLang has one socket for these calls."""

    def save(self, destination: str, kind: SaveKind) -> None:
        """See `Checkpointer`.

        Raises:
            EngineBusy: there are no whole weights to be saved.
            EngineFailed: SGLang could not write.
        """
        self._guard.check_whole()
        engine, folder = self._thread.engine, Path(destination)
        match kind:
            case "safetensors":
                write_checkpoint(self._weights, self._model, folder)
            case "sharded":
                # As every rank holds them; `load_format=sharded_state` reads it again.
                self._ask(
                    lambda: engine.save_sharded_model(path=destination, pattern=None, max_size=None)
                )
                copy_description(self._model, folder)
            case "remote":
                self._ask(lambda: engine.save_remote_model(url=destination))

    def _ask(self, call: Callable[[], None]) -> None:
        """SGLang answers on a socket of its own, not on the engine's loop."""
        with self._lock:
            self._thread.check()
            try:
                call()
            except AssertionError as error:
                message = f"SGLang could not save its weights: {error}"
                raise EngineFailed(Problem("engine_failed", message, "failed")) from error
