"""The thread that runs an engine step by step, and the only door to what it owns.

Everything that an engine changes between steps (admission, aborts, pauses, weights) is done by
this one thread, so no step ever sees half a change. Other threads leave requests and controls
here and are woken once these took effect. With nothing to do the thread blocks; it never polls.
What a step computes is left to a `Stepper`.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

import numpy as np

from rolloutbus.bus.wire.entry import AttemptKey
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import FinishReason
from rolloutbus.engine_worker.engine import (
    EngineBusy,
    EngineDied,
    EngineStats,
    PauseMode,
    Step,
    StepSink,
)
from rolloutbus.engine_worker.engines.shared.request import EngineRequest


class Stepper(Protocol):
    """Computes the steps of the requests that run together in one engine.

    Only the loop's thread calls it; other threads may read the gauges.
    """

    @property
    def n_running(self) -> int:
        """Requests that run; a gauge."""
        ...

    @property
    def n_kv_tokens(self) -> int:
        """Tokens of KV cache that running requests hold; a gauge."""
        ...

    @property
    def version(self) -> int:
        """Of the weights that the next step uses; a gauge."""
        ...

    def admit(self, waiting: deque[EngineRequest]) -> None:
        """Move from the left of `waiting` what can run now; with none running, at least one."""
        ...

    def compute(self) -> None:
        """Compute one step for all that run, without changing any request. May be slow."""
        ...

    def accept(self, dropped: AbstractSet[AttemptKey]) -> Step:
        """Give the computed tokens to their requests, except to the dropped. Must be quick.

        Requests with a finish no longer run afterwards.
        """
        ...

    def release(self, keys: Collection[AttemptKey]) -> None:
        """Forget the running requests among `keys`."""
        ...

    def retract(self, *, without_tokens_only: bool = False) -> list[EngineRequest]:
        """Drop the KV of running requests and hand them back, oldest first, their tokens kept.

        `without_tokens_only`: only requests whose KV is still being filled before their first
        token since they were admitted.
        """
        ...

    def change_weights(self, version: int) -> None:
        """From now on steps are of `version`, and no new request shares KV of older weights."""
        ...


T = TypeVar("T")

PAUSED = "paused"
"""The halt that `pause` sets and `resume` lifts."""
TORN = "torn"
"""The halt while weights are overwritten, or half overwritten."""


@dataclass(slots=True)
class _Control:
    """A call that the thread runs between two steps."""

    op: Callable[[], object]
    when_idle: bool = False
    """Wait until running requests have ended, admitting no new ones meanwhile."""
    is_drain: bool = False
    """A `resume` calls it off."""
    done: Future[object] = field(default_factory=Future[object])

    def run(self) -> None:
        """Run it and wake the caller. A refusal is passed on; the rest is a bug and ends us."""
        try:
            self.done.set_result(self.op())
        except EngineBusy as refusal:
            self.done.set_exception(refusal)
        except BaseException as bug:
            self.done.set_exception(EngineDied(f"the engine's thread ended: {bug!r}"))
            raise


@dataclass(slots=True)
class _Intake:
    """Requests, aborts and controls that other threads left since the last step."""

    requests: list[EngineRequest]
    refused: dict[AttemptKey, Problem]
    aborted: list[AttemptKey]
    controls: list[_Control]


class StepLoop:
    """Runs one `Stepper` on a thread of its own.

    `submit`, `let_go`, `abort`, `call`, `pause`, `resume`, `stats` and `close` are for other
    threads; `halt`, `lift`, `retract` and `end_running` are for the `op` of a `call`.
    """

    def __init__(self, stepper: Stepper, sink: StepSink, name: str) -> None:
        self._stepper = stepper
        self._sink = sink
        self._changed = threading.Condition()
        # Shared, under `_changed`.
        self._inbox: list[EngineRequest] = []
        self._held: dict[AttemptKey, EngineRequest] = {}
        self._refused: dict[AttemptKey, Problem] = {}
        self._aborted: dict[AttemptKey, None] = {}
        self._controls: list[_Control] = []
        self._live: set[AttemptKey] = set()
        self._cause: BaseException | None = None
        self._is_closing = False
        self._n_steps = 0
        # The thread's own.
        self._waiting: deque[EngineRequest] = deque()
        self._due: deque[_Control] = deque()
        self._when_idle: list[_Control] = []
        self._halts: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, requests: Sequence[EngineRequest], *, held: Collection[AttemptKey] = ()
    ) -> None:
        """Queue requests, all or none.

        Args:
            requests: none of a key that is in use.
            held: keys of those that must not run before `let_go`. Until then they wait like the
                others, and can be aborted.

        Raises:
            ValueError: a key is in use.
            EngineDied: the thread has ended.
        """
        with self._changed:
            self._check_alive()
            keys = {request.key for request in requests}
            if len(keys) < len(requests) or not keys.isdisjoint(self._live):
                raise ValueError(f"a key is in use: {sorted(keys & self._live or keys)}")
            self._live |= keys
            self._held.update((each.key, each) for each in requests if each.key in held)
            self._inbox.extend(each for each in requests if each.key not in held)
            self._changed.notify()

    def let_go(self, key: AttemptKey, problem: Problem | None) -> None:
        """Queue a held request, or end it with a problem; nothing if it has ended meanwhile."""
        with self._changed:
            request = self._held.pop(key, None)
            if request is None:
                return
            if problem is None:
                self._inbox.append(request)
            else:
                self._refused[key] = problem
            self._changed.notify()

    def abort(self, keys: Sequence[AttemptKey]) -> int:
        """Have these requests end with `abort`; returns how many had not ended yet.

        A token that the current step computes for one of them is thrown away.
        """
        with self._changed:
            self._check_alive()
            found = [k for k in dict.fromkeys(keys) if k in self._live and k not in self._aborted]
            self._aborted.update(dict.fromkeys(found))
            self._changed.notify()
            return len(found)

    def call(self, op: Callable[[], T], *, when_idle: bool = False) -> T:
        """Run `op` on the thread between two steps and return its result.

        Args:
            op: may raise `EngineBusy` to refuse; any other exception ends the engine.
            when_idle: first let running requests end, admitting no new ones. While the loop is
                halted nothing can end: `op` then runs at once and must judge for itself.

        Raises:
            EngineBusy: `op` refused.
            EngineDied: the thread has ended.
        """
        return cast("T", self._wait_for(_Control(op, when_idle=when_idle)))

    def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        match mode:
            case "abort":
                self.call(self._pause_abort)
            case "in_place":
                self.call(self._pause)
            case "retract":
                self.call(self._pause_retract)
            case "drain":
                self._wait_for(_Control(self._pause, when_idle=True, is_drain=True))

    def resume(self) -> None:
        """Lift a pause, or call off one that still drains."""
        self.call(self._resume)

    def stats(self) -> EngineStats:
        """Gauges of this moment; raises EngineDied when the thread has ended."""
        with self._changed:
            self._check_alive()
            n_running = self._stepper.n_running
            return EngineStats(
                steps=self._n_steps,
                n_running=n_running,
                n_waiting=max(0, len(self._live) - n_running),
                n_kv_tokens=self._stepper.n_kv_tokens,
                version=self._stepper.version,
                n_calls=len(self._controls),
                is_torn=self.is_torn,
                n_held=len(self._held),
            )

    @property
    def is_torn(self) -> bool:
        """Whether no step may use the weights as they are; a gauge."""
        return TORN in self._halts

    def close(self) -> None:
        """End the thread after its current step; callers that wait for a control get EngineDied."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def halt(self, reason: str) -> None:
        """Take no steps until `lift`; on the thread only."""
        self._halts.add(reason)

    def lift(self, reason: str) -> None:
        """End one halt; on the thread only."""
        self._halts.discard(reason)

    def retract(self, *, without_tokens_only: bool = False) -> int:
        """Put running requests back to the head of the queue; on the thread only."""
        retracted = self._stepper.retract(without_tokens_only=without_tokens_only)
        self._waiting.extendleft(reversed(retracted))
        return len(retracted)

    def end_running(self) -> int:
        """End what runs with `abort`; on the thread only. Queued requests stay."""
        keys = [request.key for request in self._stepper.retract()]
        self._end(dict.fromkeys(keys, "abort"))
        return len(keys)

    def _pause(self) -> None:
        self._halts.add(PAUSED)
        self._settle_drains()

    def _pause_retract(self) -> None:
        self.retract()
        self._pause()

    def _pause_abort(self) -> None:
        self.end_running()
        waiting = [request.key for request in self._waiting]
        self._waiting.clear()
        with self._changed:
            waiting += self._held
        self._end(dict.fromkeys(waiting, "abort"))
        self._pause()

    def _resume(self) -> None:
        self._halts.discard(PAUSED)
        self._settle_drains()

    def _settle_drains(self) -> None:
        """A later pause or resume has decided what these waited for."""
        for drain in [control for control in self._when_idle if control.is_drain]:
            self._when_idle.remove(drain)
            drain.done.set_result(None)

    def _wait_for(self, control: _Control) -> object:
        with self._changed:
            self._check_alive()
            self._controls.append(control)
            self._changed.notify()
        return control.done.result()

    def _check_alive(self) -> None:
        if self._cause is not None:
            raise EngineDied(f"the engine's thread ended: {self._cause!r}") from self._cause
        if self._is_closing:
            raise EngineDied("the engine was closed")

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while (intake := self._next_intake()) is not None:
                self._turn(intake)
        # An error that ends the loop must reach the callers that wait: stats() then fails, and the
        # process that hosts the engine ends.
        except BaseException as error:  # noqa: BLE001
            cause = error
        with self._changed:
            self._cause = cause
            self._is_closing = True
            stranded = [*self._due, *self._when_idle, *self._controls]
        for control in stranded:
            if not control.done.done():
                control.done.set_exception(EngineDied(f"the engine's thread ended: {cause!r}"))

    def _next_intake(self) -> _Intake | None:
        """Block until there is something to do; None when it is time to end."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._is_closing:
                return None
            aborted = list(self._aborted)
            intake = _Intake(self._inbox, self._refused, aborted, self._controls)
            self._inbox, self._refused, self._controls = [], {}, []
            return intake

    def _has_work(self) -> bool:
        asked_for = self._inbox or self._refused or self._aborted or self._controls
        asked_for = asked_for or self._is_closing
        became_idle = self._when_idle and not self._stepper.n_running
        return bool(asked_for or became_idle) or self._may_step()

    def _turn(self, intake: _Intake) -> None:
        """Do what was asked for, then one step if there is one to do."""
        self._waiting.extend(intake.requests)
        self._end({r.key: end for r in intake.requests if (end := r.ending()) is not None})
        self._end(intake.refused)
        self._end(dict.fromkeys(intake.aborted, "abort"))
        self._due.extend(intake.controls)
        while self._due:
            control = self._due.popleft()
            if control.when_idle and self._stepper.n_running and not self._halts:
                self._when_idle.append(control)
            else:
                control.run()
        if not self._stepper.n_running:
            while self._when_idle:
                self._when_idle.pop(0).run()
        if self._may_step():
            self._step()

    def _may_step(self) -> bool:
        may_admit = bool(self._waiting) and not self._when_idle
        return not self._halts and (self._stepper.n_running > 0 or may_admit)

    def _step(self) -> None:
        if not self._when_idle:
            self._stepper.admit(self._waiting)
            assert self._stepper.n_running, "an idle stepper must admit what was accepted"
        self._stepper.compute()
        with self._changed:
            step = self._stepper.accept(self._aborted.keys())
            ended = (*step.finishes, *step.problems)
            self._live.difference_update(step.keys[row] for row, _ in ended)
            self._n_steps += 1
        if step.keys:
            self._sink(step)

    def _end(self, endings: Mapping[AttemptKey, FinishReason | Problem]) -> None:
        """Emit the last, empty row of these requests, wherever they are."""
        with self._changed:
            endings = {key: reason for key, reason in endings.items() if key in self._live}
            self._live.difference_update(endings)
            for key in endings:
                self._aborted.pop(key, None)
                self._held.pop(key, None)
        if not endings:
            return
        self._stepper.release(endings)
        self._waiting = deque(r for r in self._waiting if r.key not in endings)
        self._sink(_empty_step(endings, self._stepper.version))


def _empty_step(endings: Mapping[AttemptKey, FinishReason | Problem], version: int) -> Step:
    """A step that brings endings and no tokens."""
    ends = list(enumerate(endings.values()))
    return Step(
        keys=list(endings),
        counts=[0] * len(endings),
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        version=version,
        finishes=[(row, end) for row, end in ends if not isinstance(end, Problem)],
        problems=[(row, end) for row, end in ends if isinstance(end, Problem)],
    )
