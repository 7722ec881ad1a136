"""Which workers the example finds too slow, and from what it reads that."""

import msgspec
import pytest

from rolloutbus.bus.wire.messages.control import WorkerStatus
from rolloutbus.examples.relieve import Pace, Rule, SlowWatch, paces_of
from rolloutbus.types import FleetStatus

RULE = Rule(factor=2.0, patience=2)
USUAL = [Pace("w0", 100.0, 16), Pace("w1", 110.0, 16), Pace("w2", 90.0, 16)]


def _twice(*paces: Pace, rule: Rule = RULE) -> list[str]:
    watch = SlowWatch(rule)
    watch.look(paces)
    return watch.look(paces)


def test_the_slowest_comes_first_and_only_after_as_many_looks_as_asked_for() -> None:
    watch = SlowWatch(RULE)
    paces = [*USUAL, Pace("w3", 30.0, 16), Pace("w4", 20.0, 16)]
    assert watch.look(paces) == []
    assert watch.look(paces) == ["w4", "w3"]


def test_one_usual_look_in_between_begins_the_count_anew() -> None:
    watch = SlowWatch(RULE)
    slow = [*USUAL, Pace("w3", 30.0, 16)]
    watch.look(slow)
    watch.look([*USUAL, Pace("w3", 80.0, 16)])
    assert watch.look(slow) == []
    assert watch.look(slow) == ["w3"]


@pytest.mark.parametrize(
    "pace", [Pace("w3", 51.0, 16), Pace("w3", 0.0, 0), Pace("w3", 30.0, 64)], ids=str
)
def test_who_is_a_little_slow_or_idle_or_has_far_more_to_do_is_left_alone(pace: Pace) -> None:
    assert _twice(*USUAL, pace) == []


def test_a_worker_that_stands_still_with_requests_is_slow() -> None:
    assert _twice(*USUAL, Pace("w3", 0.0, 4)) == ["w3"]


def test_nobody_is_slow_among_too_few() -> None:
    assert _twice(Pace("w0", 100.0, 16), Pace("w1", 1.0, 16)) == []


def test_requests_that_gather_at_a_slow_worker_do_not_hide_it() -> None:
    assert _twice(*USUAL, Pace("w3", 20.0, 64)) == ["w3"]


def test_an_idle_worker_is_no_measure_for_busy_ones() -> None:
    idle = [Pace("w0", 500.0, 1), Pace("w1", 500.0, 1), Pace("w2", 500.0, 1)]
    assert _twice(*idle, Pace("w3", 100.0, 16), Pace("w4", 100.0, 16)) == []


def _worker(name: str, steps: int, n_running: int, epoch: str = "a.1") -> WorkerStatus:
    worker = WorkerStatus(
        name, f"{name}.{epoch}", "ready", "default", 0, "fake", 16, n_running, 0, 0, 0.0, 1
    )
    return msgspec.structs.replace(worker, steps=steps)


def _status(*workers: WorkerStatus) -> FleetStatus:
    recovering = False
    return FleetStatus(1, "r", recovering, list(workers), {}, 0, 0, 1, {})


def test_paces_are_steps_between_two_looks_of_workers_that_served_all_the_time() -> None:
    blocked = msgspec.structs.replace(_worker("w2", 10, 4), blocked_by={"paused": "It is paused."})
    before = _status(_worker("w0", 100, 4), _worker("w1", 100, 4), blocked)
    after = _status(
        _worker("w0", 300, 2),
        _worker("w1", 20, 4, "b.1"),
        _worker("w2", 90, 4),
        _worker("w3", 9, 1),
    )
    assert paces_of(before, after, 2.0) == {"default": [Pace("w0", 100.0, 2)]}


def test_paces_are_by_the_time_of_heartbeats_and_silence_is_no_slowness() -> None:
    before = _status(_worker("w0", 100, 4), _worker("w1", 100, 4))
    late = msgspec.structs.replace(_worker("w0", 250, 4), beat_age_ms=500)
    silent = msgspec.structs.replace(_worker("w1", 100, 4), beat_age_ms=2000)
    after = _status(late, silent)
    assert paces_of(before, after, 2.0) == {"default": [Pace("w0", 100.0, 4)]}
