"""A worker measures times to tokens and counts repairs, and its heartbeats say so."""

import pytest

from rolloutbus.bus.wire.durations import BOUNDS_S, DurationCounter, Durations
from rolloutbus.bus.wire.messages.generation import Abort, Prefix, Repair
from tests.unit.engine_worker.core_bench import Bench


def measured(bench: Bench, name: str) -> Durations | None:
    bench.pass_time(0.6)
    return bench.said.heartbeat().durations.get(name)


def range_of(seconds: float) -> int:
    return next(i for i, bound in enumerate(BOUNDS_S) if seconds <= bound)


def test_a_duration_falls_into_the_range_that_ends_with_it() -> None:
    counter = DurationCounter()
    for seconds in (0.0, 0.001, 0.0011, 250.0, 251.0):
        counter.add(seconds)

    counted = counter.counted()

    assert counted.counts[:2] == [2, 1]
    assert counted.counts[-2:] == [1, 1]
    assert counted.total_s == pytest.approx(501.0021)


def test_nothing_is_told_before_the_first_token(bench: Bench) -> None:
    bench.generate("r1")

    assert measured(bench, "first_token") is None
    assert measured(bench, "next_token") is None


def test_the_first_token_is_timed_from_the_arrival(bench: Bench) -> None:
    bench.generate("r1")
    bench.clock.advance(0.2)
    bench.step({"r1": [1]})

    first = measured(bench, "first_token")

    assert first is not None
    assert first.counts[range_of(0.2)] == sum(first.counts) == 1
    assert first.total_s == pytest.approx(0.2)


def test_tokens_that_come_together_share_the_time_since_the_last_one(bench: Bench) -> None:
    bench.generate("r1")
    bench.step({"r1": [1]})
    bench.clock.advance(0.03)
    bench.step({"r1": [1, 2, 3]}, {"r1": "length"})

    following = measured(bench, "next_token")

    assert following is not None
    assert following.counts[range_of(0.01)] == sum(following.counts) == 3
    assert following.total_s == pytest.approx(0.03)


def test_a_step_without_tokens_is_no_token(bench: Bench) -> None:
    bench.generate("r1")
    bench.step({"r1": []}, {"r1": "abort"})

    assert measured(bench, "first_token") is None


def test_requests_are_counted_by_their_ending(bench: Bench) -> None:
    held = Prefix(b"\1\0\0\0", b"\0\0\0\0", [(0, 1)])
    bench.generate("r1", prompt=(1, 2, 3))
    bench.generate("r2", prefix=held)
    bench.generate("r3", deadline_s=0.1)
    bench.generate("r4", versions="exact:9")
    bench.step({"r1": [1], "r2": [2]}, {"r1": "length"})
    bench.command("abort", "c/1", Abort(["r2"]))
    bench.pass_time(0.6)

    counters = bench.said.heartbeat().counters

    assert (counters["requests"], counters["resumed_requests"]) == (3, 1)
    assert counters["prompt_tokens"] == 3 + 2 + 2
    for kind in ("finished", "cancelled", "expired", "refused"):
        assert counters[f"{kind}_requests"] == 1
    assert counters["failed_requests"] == 0


def test_repairs_are_counted(bench: Bench) -> None:
    bench.generate("r1")
    bench.step({"r1": [1]})
    bench.command("repair", "c/1", Repair("r1", (1, 1), 0))
    bench.pass_time(0.6)

    counters = bench.said.heartbeat().counters

    assert counters["repairs"] == 1
    assert counters["fenced"] == counters["engine_exits"] == 0
