"""Whatever a network loses and whatever a worker says, a subscriber's books are right."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.wire.messages.generation import FinishReason
from rolloutbus.replay.stream.core import GONE_S, SILENT_S
from rolloutbus.replay.stream.event_queue import SubscriberSettings
from rolloutbus.replay.stream.events import Finished, GapLost, Tokens
from tests.unit.replay.stream_bench import (
    BUSY,
    NOT_HERE,
    RID,
    Execution,
    StreamBench,
    tokens_of,
)

FINISHES: list[FinishReason | None] = [None, None, "stop", "abort"]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_token_is_told_once_or_told_to_be_lost_whatever_goes_missing(
    data: st.DataObject,
) -> None:
    n_tokens = data.draw(st.integers(1, 30), "tokens")
    bench = StreamBench()
    sampled = 0
    while sampled < n_tokens:
        stop = min(n_tokens, sampled + data.draw(st.integers(1, 5)))
        if data.draw(st.booleans(), "arrives"):
            bench.row(sampled, stop, "stop" if stop == n_tokens else None)
        sampled = stop
        if data.draw(st.booleans(), "beat") and sampled < n_tokens:
            bench.idle({RID: sampled})
        if bench.asked and data.draw(st.booleans(), "answered"):
            if data.draw(st.booleans(), "repaired"):
                bench.answer(sampled)
            else:
                bench.end(NOT_HERE)
        if data.draw(st.booleans(), "read"):
            bench.read()
    if bench.core.n_open:
        bench.idle({})
    while bench.asked:
        bench.answer(sampled)
    bench.advance(GONE_S + SILENT_S)
    bench.read()

    assert bench.core.n_open == 0
    told: list[int | None] = []
    for event in bench.told:
        if isinstance(event, Tokens):
            assert event.start == len(told)
            told += event.tokens.tolist()
        elif isinstance(event, GapLost):
            assert event.start == len(told)
            told += [None] * (event.stop - event.start)
    wanted = tokens_of(0, n_tokens)
    assert all(each in (None, token) for each, token in zip(told, wanted, strict=False))
    ends = bench.of(Finished)
    assert bool(ends) == bool(told)
    if ends:
        (end,) = ends
        assert end.tokens.tolist() == [each for each in told if each is not None]
        assert end.n_missing == told.count(None)
        assert end.finish_reason is None or len(told) == n_tokens


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_outlives_workers_that_say_anything_and_holds_nothing_in_the_end(
    data: st.DataObject,
) -> None:
    small = SubscriberSettings(
        waiting_bytes=2_000, held_bytes=5_000, unread_messages=5, repairs_at_once=2
    )
    bench = StreamBench(small)
    rids = st.sampled_from(["c/1", "c/2", "d/1"])
    executions = st.builds(
        Execution,
        st.tuples(st.just(1), st.integers(1, 3)),
        st.sampled_from(["w0", "w1"]),
        st.integers(0, 1),
    )
    happenings = st.sampled_from(["row", "row", "idle", "answer", "refuse", "read", "tick"])
    sizes = st.integers(0, 20) | st.just(2**27)
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(happenings):
            case "row":
                start, by = data.draw(sizes), data.draw(executions)
                stop = start + data.draw(st.integers(0, 9))
                finish = data.draw(st.sampled_from(FINISHES))
                bench.n_unread = data.draw(st.integers(0, 6))
                bench.row(start, stop, finish, rid=data.draw(rids), by=by)
            case "idle":
                attempt = (1, data.draw(st.integers(1, 3)))
                bench.idle(data.draw(st.dictionaries(rids, sizes)), attempt=attempt)
            case "answer" if bench.asked:
                start = data.draw(st.integers(0, 20))
                bench.answer(start + data.draw(st.integers(0, 9)), start=start)
            case "refuse" if bench.asked:
                bench.end(data.draw(st.sampled_from([NOT_HERE, BUSY])))
            case "read":
                bench.read()
            case _:
                bench.advance(data.draw(st.sampled_from([0.25, 3.5])))
        assert bench.core.events.n_held_bytes <= small.held_bytes
        assert 0 <= bench.core.events.n_waiting_bytes <= bench.core.events.n_held_bytes
    bench.n_unread = 0
    bench.advance(GONE_S + SILENT_S)
    bench.read()
    assert bench.core.n_open == 0
    assert bench.core.events.n_held_bytes == bench.core.events.n_waiting_bytes == 0
