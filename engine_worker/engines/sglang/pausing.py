"""The gate before SGLang's scheduler, and what becomes of the requests behind it.

It is shut for reasons, and opens when the last one is gone.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import get_args

from rolloutbus.engine_worker.engine import EngineBusy, InFlight, PauseMode
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.guard import PAUSED, StateGuard, Stop
from rolloutbus.engine_worker.engines.sglang.live import LiveRequest, LiveRequests
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream

STOPS: Mapping[PauseMode, Stop] = {"in_place": "hold", "retract": "retract"}
SGLANG_MODES: Mapping[Stop, str] = {"hold": "in_place", "retract": "retract"}
MODES = get_args(PauseMode)


class Pausing:
    """One engine's; calls come from any thread but the engine's."""

    def __init__(self, thread: EngineThread, live: LiveRequests, guard: StateGuard) -> None:
        self.lock = threading.RLock()
        """Held while the guard's state changes."""
        self.guard = guard
        """See `StateGuard`; under the lock."""
        self.n_calls = 0
        """Pauses that wait."""
        self._thread = thread
        self._live = live
        self._n_asked = 0
        """Pauses and resumes so far: a drain is over when the next one comes."""
        thread.when_dead(live.wake)

    @property
    def n_live(self) -> int:
        """Requests that SGLang has, those before the gate included."""
        return len(self._live)

    def pause(self, mode: PauseMode) -> None:
        """See `Engine`.

        Raises:
            ValueError: there is no such mode.
            EngineFailed: not by this engine.
            EngineBusy: not now.
        """
        if mode not in MODES:
            raise ValueError(f"mode: {mode!r} is none of {', '.join(MODES)}")
        self.n_calls += 1
        try:
            self._asked()
            if mode in STOPS:
                with self.lock:
                    self.stop(PAUSED, STOPS[mode])
            else:
                self._pause_settled(mode)
        finally:
            self.n_calls -= 1

    def resume(self) -> None:
        """See `Engine`."""
        self._asked()
        with self.lock:
            self.lift(PAUSED)

    def stop(self, reason: str, how: Stop) -> None:
        """Shut the gate; no step runs when this returns. Under the lock.

        Args:
            reason: keeps it shut until `lift`.
            how: `hold` leaves requests in their batch, `retract` puts them back into the queue.

        Raises:
            EngineFailed: not by this engine.
            EngineBusy: not now.
        """
        self.guard.check_stop(how)
        self._hold(how)
        self.guard.reasons.add(reason)

    def settle(self) -> None:
        """Shut the gate behind the last request, until a `lift`. Under the lock.

        Raises:
            EngineBusy: there are requests.
        """
        if not self._settle():
            raise EngineBusy(f"{self.n_live} requests run; pause with `abort` or `drain` first")

    def lift(self, reason: str) -> None:
        """A reason is gone: the gate opens if it was the last one. Under the lock."""
        self.guard.reasons.discard(reason)
        if self.guard.state != "running" and not self.guard.must_stay_shut:
            self._go_on()

    def begin_update(self, in_flight: InFlight) -> None:
        """A change of weights begins; not under the lock, which it may outlast.

        Raises:
            EngineFailed, EngineBusy: as of `StateGuard.begin_update`.
        """
        with self.lock:
            self.guard.begin_update(in_flight, self.n_live)

    def end_update(self, *, is_torn: bool) -> None:
        """It has ended. Whole weights open a gate that was shut for want of them."""
        with self.lock:
            self.guard.end_update(is_torn=is_torn)
            self.lift("")

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        """End these; each tells its end by itself."""
        for live in requests:
            live.is_aborted = True
        self._thread.do(lambda: self._abort_now(requests))

    def _abort_now(self, requests: Sequence[LiveRequest]) -> None:
        states = self._thread.manager.rid_to_state
        for live in requests:
            state = states.get(live.rid)
            if state is not None and getattr(state, "dispatched", True):
                self._thread.manager.abort_request(rid=live.rid)
            elif state is not None and live.task is not None:
                # It waits at SGLang's own gate. No scheduler knows it, and would run it in spite of
                # an abort once the gate opens.
                live.task.cancel()
                self._live.end(live.rid)
            # Else it has not begun and never will, or has just ended by itself.

    def _asked(self) -> None:
        self._n_asked += 1
        self._live.wake()

    def _pause_settled(self, mode: PauseMode) -> None:
        """Let requests end, or end them, and shut the gate behind the last one."""
        n_asked = self._n_asked
        while True:
            with self.lock:
                if (mode == "drain" or not self.n_live) and self._settle():
                    self.guard.reasons.add(PAUSED)
                    return
                if self.guard.state in ("held", "retracted"):
                    self._go_on()
                if mode == "abort":
                    self.abort(self._live.all())
            # Without the lock: others may decide otherwise meanwhile.
            if mode == "abort":
                self._until_aborted()
            elif not self._until_drained(n_asked):
                return

    def _until_aborted(self) -> None:
        timeout_s = self._thread.timeout_s
        if not self._live.wait_until_none(timeout_s, lambda: self._thread.cause):
            self._thread.die(f"requests have not ended {timeout_s:g} s after their abort")
        self._thread.check()

    def _until_drained(self, n_asked: int) -> bool:
        """Whether everything has ended; False if something else was asked for meanwhile."""
        has_ended = self._live.wait_until_none(
            None, lambda: self._thread.cause or self._n_asked != n_asked
        )
        self._thread.check()
        return has_ended

    def _settle(self) -> bool:
        """Shut the gate behind the last request; False if there are any."""
        guard = self.guard
        if guard.state == "settled":
            return True
        if self.n_live:
            return False
        was_held = guard.state != "running"
        if was_held:  # a scheduler that is held may keep the batch that has just ended
            self._go_on()
        if self._thread.call(self._shut_if_none_left, "pause"):
            guard.moved("settle")
            return True
        if was_held:
            self._hold("hold")
        return False

    async def _shut_if_none_left(self) -> bool:
        # SGLang looks once a second whether its callers have left; so they leave first.
        while self._thread.tasks and not self.n_live:
            await asyncio.wait({*self._thread.tasks})
        if self.n_live:
            return False
        # This mode leaves the scheduler awake, so that it can flush, and sleeps when idle. It
        # shuts before anything else on this loop can run, and there is nothing left to abort.
        await self._thread.manager.pause_generation(
            upstream.request("PauseGenerationReqInput", mode="abort")
        )
        return True

    def _hold(self, how: Stop) -> None:
        before = self.guard.state
        if before == "running" or (before == "held" and how == "retract"):
            self._thread.call(lambda: self._send(how), "pause")
        self.guard.moved(how)

    async def _send(self, how: Stop) -> None:
        manager = self._thread.manager
        request = upstream.request("PauseGenerationReqInput", mode=SGLANG_MODES[how])
        await manager.pause_generation(request)
        # The pause is only sent; this is answered behind it.
        await manager.get_internal_state()

    def _go_on(self) -> None:
        request = upstream.request("ContinueGenerationReqInput", torch_empty_cache=False)
        manager = self._thread.manager
        self._thread.call(lambda: manager.continue_generation(request), "resume")
        self.guard.moved("go_on")
