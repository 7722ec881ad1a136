"""What the step loop does with calls that arrive in the middle of a step."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.engine_worker.engine import EngineDied, EngineFacts, Work
from rolloutbus.engine_worker.engines.fake.engine import FakeBatch
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.engines.shared.request import EngineRequest, open_request
from rolloutbus.engine_worker.engines.shared.step_loop import StepLoop
from tests.step_log import DEADLINE_S, PACE_S, StepLog, key

FACTS = EngineFacts("test", 100, 20_000, 2)


class SlowBatch(FakeBatch):
    """Computes a step for as long as the test likes."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(slots=2))
        self.is_computing = threading.Event()
        self.may_finish = threading.Event()

    def compute(self) -> None:
        self.is_computing.set()
        assert self.may_finish.wait(DEADLINE_S)
        super().compute()


@pytest.fixture
def batch() -> SlowBatch:
    return SlowBatch()


@pytest.fixture
def loop(batch: SlowBatch, log: StepLog) -> Iterator[StepLoop]:
    loop = StepLoop(batch, log, "test-loop")
    yield loop
    batch.may_finish.set()
    loop.close()


def request(name: str, n: int = 3) -> EngineRequest:
    work = Work(key(name), np.ones(2, np.int32), SamplingParams(n))
    return open_request(work, FACTS, 0)


def test_an_abort_during_a_step_throws_its_token_away(
    loop: StepLoop, batch: SlowBatch, log: StepLog
) -> None:
    loop.submit([request("a", 1), request("b", 1)])
    assert batch.is_computing.wait(DEADLINE_S)
    assert loop.abort([key("a")]) == 1
    assert loop.abort([key("a")]) == 0
    batch.may_finish.set()
    log.wait_finished("a", "b")
    assert (log["a"].tokens, log["a"].finishes) == ([], ["abort"])
    assert (len(log["b"].tokens), log["b"].finishes) == (1, ["length"])


def test_calls_that_do_not_wait_return_during_a_step(loop: StepLoop, batch: SlowBatch) -> None:
    loop.submit([request("a")])
    assert batch.is_computing.wait(DEADLINE_S)
    loop.submit([request("b")])
    assert loop.stats().steps == 0
    assert loop.stats().n_waiting == 1


def test_a_pause_returns_after_the_current_step(
    loop: StepLoop, batch: SlowBatch, log: StepLog
) -> None:
    loop.submit([request("a", 500)])
    assert batch.is_computing.wait(DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(loop.pause, "in_place")
        assert not paused.done()
        batch.may_finish.set()
        paused.result(DEADLINE_S)
    n_steps = loop.stats().steps
    assert len(log.steps) == n_steps


def test_closing_wakes_who_waits_for_a_drain(
    loop: StepLoop, batch: SlowBatch, log: StepLog
) -> None:
    log.hold(1)
    loop.submit([request("a", 10_000)])
    batch.may_finish.set()
    log.wait_held()
    with ThreadPoolExecutor(2) as pool:
        drained = pool.submit(loop.pause, "drain")
        _until(lambda: loop.stats().n_calls == 1)
        closed = pool.submit(loop.close)
        _until(lambda: _is_closed(loop))
        log.release()
        closed.result(DEADLINE_S)
        with pytest.raises(EngineDied):
            drained.result(DEADLINE_S)


def _until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(PACE_S)  # a gauge tells nobody when it changes


def _is_closed(loop: StepLoop) -> bool:
    """Whether it takes nothing more, though its thread may still be at a step."""
    try:
        loop.stats()
    except EngineDied:
        return True
    return False


WRONG = bad_request("grammar.text", "it is none")


def test_a_held_request_runs_when_it_is_let_go_and_delays_nobody(
    loop: StepLoop, batch: SlowBatch, log: StepLog
) -> None:
    batch.may_finish.set()
    loop.submit([request("held"), request("other")], held=[key("held")])
    log.wait_finished("other")
    assert (loop.stats().n_waiting, loop.stats().n_held) == (1, 1)
    assert log["held"].tokens == []
    with pytest.raises(ValueError, match="in use"):
        loop.submit([request("held")])
    loop.let_go(key("held"), None)
    log.wait_finished("held")
    assert loop.stats().n_held == 0
    assert len(log["held"].tokens) == 3


def test_a_held_request_ends_with_the_problem_that_it_is_let_go_with(
    loop: StepLoop, log: StepLog
) -> None:
    loop.submit([request("held")], held=[key("held")])
    loop.let_go(key("held"), WRONG)
    log.wait_until(lambda: bool(log.steps))
    assert [(step.keys, step.problems) for step in log.steps] == [([key("held")], [(0, WRONG)])]
    assert loop.stats().n_waiting == 0


@pytest.mark.parametrize("by_pause", [False, True])
def test_a_held_request_that_was_ended_stays_so(
    loop: StepLoop, batch: SlowBatch, log: StepLog, by_pause: bool
) -> None:
    batch.may_finish.set()
    loop.submit([request("held")], held=[key("held")])
    if by_pause:
        loop.pause("abort")
        loop.resume()
    else:
        loop.abort([key("held")])
    log.wait_finished("held")
    loop.let_go(key("held"), WRONG)
    loop.submit([request("later")])
    log.wait_finished("later")
    assert (log["held"].finishes, log["held"].tokens) == (["abort"], [])
    assert not any(step.problems for step in log.steps)
