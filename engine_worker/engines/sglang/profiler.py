"""Profiles of SGLang's schedulers, by the profiler of torch."""

from pathlib import Path

from rolloutbus.bus.wire.messages.engine import StartProfile
from rolloutbus.engine_worker.engine import EngineBusy
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import TokenizerManager

ACTIVITIES = ("CPU", "GPU")
"""SGLang has more; those write pickles, or end a scheduler whose machine lacks a tool."""


class Profiling:
    """Implements `Profiler`: the one record that SGLang can make at a time."""

    def __init__(
        self, thread: EngineThread, manager: TokenizerManager, timeout_s: float, *, has_gpu: bool
    ) -> None:
        self._thread = thread
        self._manager = manager
        self._timeout_s = timeout_s
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
            self._thread.call(
                lambda: self._manager.start_profile(request), self._timeout_s, "start_profile"
            )
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
            self._thread.call(self._manager.stop_profile, self._timeout_s, "stop_profile")
        except RuntimeError as error:
            self._thread.check()
            if not self._stops_by_itself:
                raise EngineBusy(f"SGLang has recorded nothing: {error}") from error
