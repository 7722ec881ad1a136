"""What an engine under test emitted, by request, for tests that wait for it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar

from rolloutbus.bus.wire.entry import AttemptKey, RequestId
from rolloutbus.engine_worker.engine import Engine, Step

Result = TypeVar("Result")

DEADLINE_S = 60.0
PACE_S = 0.001
"""Between two looks at an engine's gauges, which tell nobody when they change."""


def key(name: str) -> AttemptKey:
    """The first attempt of the request `name`."""
    return (RequestId(name), (1, 1))


@dataclass
class Emitted:
    """One request's tokens so far."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    behaviour: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finishes: list[str] = field(default_factory=list[str])


class StepLog:
    """A step sink. Can hold the engine's thread still right after a chosen step.

    A context manager: leaving it ends the threads that `call_midway` began.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._changed = threading.Condition()
        self._by_key: dict[AttemptKey, Emitted] = {}
        self._hold_at: int | None = None
        self.steps: list[Step] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Not waited for: closing the engine ends its calls.
        self._pool.shutdown(wait=False)

    def __call__(self, step: Step) -> None:
        """Take one step from the engine."""
        with self._changed:
            self.steps.append(step)
            self._record(step)
            self._changed.notify_all()
            held = self._changed.wait_for(lambda: not self._is_holding(), DEADLINE_S)
            assert held, "the test never released the engine"

    def __getitem__(self, name: str) -> Emitted:
        """What the request `name` has so far."""
        return self._by_key.setdefault(key(name), Emitted())

    def hold(self, n_steps: int) -> None:
        """Block the engine's thread inside of step `n_steps`, counted from the first."""
        with self._changed:
            self._hold_at = n_steps

    def wait_held(self) -> None:
        """Wait until the engine's thread is blocked."""
        self.wait_until(self._is_holding)

    def release(self) -> None:
        """Let the engine's thread go on."""
        with self._changed:
            self._hold_at = None
            self._changed.notify_all()

    def call_midway(self, engine: Engine, call: Callable[[], Result]) -> Future[Result]:
        """Make a call that waits for the step that is held, and let the engine go on."""
        self.wait_held()
        future = self._pool.submit(call)
        give_up_at = time.monotonic() + DEADLINE_S
        while not engine.stats().n_calls:
            assert time.monotonic() < give_up_at, "the call did not reach the engine"
            time.sleep(PACE_S)  # a gauge tells nobody when it changes
        self.release()
        return future

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait until `is_reached`, judged after each step."""
        with self._changed:
            assert self._changed.wait_for(is_reached, DEADLINE_S), "the engine did not get there"

    def wait_finished(self, *names: str) -> None:
        """Wait until these requests have ended."""
        self.wait_until(lambda: all(self[name].finishes for name in names))

    def _is_holding(self) -> bool:
        return self._hold_at is not None and len(self.steps) >= self._hold_at

    def _record(self, step: Step) -> None:
        start = 0
        for row, (attempt, count) in enumerate(zip(step.keys, step.counts, strict=True)):
            emitted = self._by_key.setdefault(attempt, Emitted())
            assert not emitted.finishes, f"{attempt} got a row after its ending"
            part = slice(start, start + count)
            behaviour = (
                step.logprobs if step.behaviour_logprobs is None else step.behaviour_logprobs
            )
            emitted.tokens += step.tokens[part].tolist()
            emitted.logprobs += step.logprobs[part].tolist()
            emitted.behaviour += behaviour[part].tolist()
            emitted.versions += [step.version] * count
            emitted.finishes += [reason for at, reason in step.finishes if at == row]
            start += count
