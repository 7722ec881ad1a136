"""What becomes of the tokens that scheduler taps tell."""

import numpy as np

from rolloutbus.bus.wire.entry import AttemptKey, RequestId
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.engine_worker.engine import Step, Work
from rolloutbus.engine_worker.engines.sglang.live import LiveRequests
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import RowFinish, Rows


def key(name: str) -> AttemptKey:
    return (RequestId(name), (1, 1))


def work(name: str) -> Work:
    return Work(key(name), np.array([1], np.int32), SamplingParams())


def rows(version: int | None, counts: dict[str, int], finishes: list[RowFinish]) -> Rows:
    column = np.zeros(sum(counts.values()), "<i4").tobytes()
    return Rows(version, [*counts], [*counts.values()], column, column, finishes)


def test_tokens_of_no_version_fail_their_requests_and_are_never_version_0() -> None:
    steps: list[Step] = []
    live = LiveRequests(steps.append)
    first, second, third = (live.add(work(name)) for name in ("a", "b", "c"))
    told = rows(None, {first.rid: 2, second.rid: 0, "of nobody": 1}, [RowFinish(1, "abort")])
    given_up = live.tell(told)
    (step,) = steps
    assert [each.key for each in given_up] == [first.key]
    assert step.keys == [first.key, second.key]
    assert len(step.tokens) == 0
    ((row, problem),) = step.problems
    assert (row, problem.code, problem.outcome) == (0, "engine_failed", "failed")
    assert "nobody knows the weights" in problem.message
    assert list(step.finishes) == [(1, "abort")]
    assert live.all() == [third]


def test_tokens_of_a_version_go_on() -> None:
    steps: list[Step] = []
    live = LiveRequests(steps.append)
    request = live.add(work("a"))
    assert live.tell(rows(3, {request.rid: 2}, [])) == []
    (step,) = steps
    assert (step.version, list(step.counts)) == (3, [2])
