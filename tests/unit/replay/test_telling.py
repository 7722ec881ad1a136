"""A slow reader is told less, knows it, and loses nothing that there is room for."""

import pytest

from rolloutbus.replay.stream.event_queue import (
    MAX_NEWS,
    STREAM_BYTES,
    TOKEN_BYTES,
    SubscriberSettings,
)
from rolloutbus.replay.stream.events import Demoted, Finished, LetGo, Restored, Tokens
from tests.unit.replay.stream_bench import RID, StreamBench, tokens_of

ROOM = 300
"""Tokens that may wait."""
SMALL = SubscriberSettings(waiting_bytes=TOKEN_BYTES * ROOM, unread_messages=50)
PATIENT = SubscriberSettings(waiting_bytes=TOKEN_BYTES * ROOM, is_restored=False)
N = 10 + ROOM + 1
OTHER = "c/2"


def overwhelmed(settings: SubscriberSettings = SMALL) -> StreamBench:
    """A reader that has read 10 tokens of a stream, and then slept until too many waited."""
    bench = StreamBench(settings)
    bench.row(0, 10)
    bench.read()
    for start in range(10, N):
        bench.row(start, start + 1)
    return bench


def test_a_reader_for_whom_too_much_waits_is_demoted_and_told_so_first() -> None:
    bench = overwhelmed(PATIENT)
    bench.row(N, N + 9)
    told = bench.read()
    assert told == [Demoted("reader", TOKEN_BYTES * (ROOM + 1))]
    assert not bench.core.events.is_live
    assert bench.core.events.n_waiting_bytes == 0
    bench.row(N + 9, N + 10, "stop")
    (end,) = bench.read()
    assert isinstance(end, Finished)
    assert end.tokens.tolist() == tokens_of(0, N + 10)


def test_a_reader_that_has_taken_everything_goes_on_where_it_was() -> None:
    bench = overwhelmed()
    bench.row(0, 5, "stop", rid=OTHER)
    told = bench.read()
    assert [type(event) for event in told] == [Demoted, Finished, Restored, Tokens]
    assert isinstance(told[-1], Tokens)
    assert told[-1].start == 10
    assert bench.text() == tokens_of(0, N)
    bench.row(N, N + 1, "stop")
    bench.read()
    assert bench.text() == bench.finished().tokens.tolist() == tokens_of(0, N + 1)


def test_what_was_held_back_does_not_demote_it_again() -> None:
    bench = overwhelmed()
    bench.row(N, 3 * N)
    assert [type(bench.core.events.take(0)) for _ in range(2)] == [Demoted, Restored]
    bench.row(3 * N, 3 * N + 1)
    assert bench.core.events.is_live
    bench.read()
    assert bench.text() == tokens_of(0, 3 * N + 1)
    bench.row(3 * N + 1, 4 * N)
    assert not bench.core.events.is_live


def test_it_may_ask_to_catch_up_before_it_has_taken_all_results() -> None:
    bench = overwhelmed(PATIENT)
    bench.row(0, 5, "stop", rid=OTHER)
    bench.core.events.restore()
    told = bench.read()
    assert [type(event) for event in told] == [Demoted, Restored, Tokens, Finished, Tokens]
    assert bench.text() == tokens_of(0, N)
    assert bench.text(OTHER) == tokens_of(0, 5)


def test_results_that_wait_while_it_is_demoted_are_all_told() -> None:
    bench = overwhelmed()
    for n in range(200):
        bench.row(0, 30, "stop", rid=f"d/{n}")
    ends = [event for event in bench.read() if isinstance(event, Finished)]
    assert [event.rid for event in ends] == [f"d/{n}" for n in range(200)]
    assert all(event.tokens.tolist() == tokens_of(0, 30) for event in ends)


def test_who_reads_its_socket_late_is_demoted_until_that_is_empty() -> None:
    bench = StreamBench(SMALL)
    bench.n_unread = SMALL.unread_messages
    bench.row(0, 5)
    (event,) = bench.read()
    assert event == Demoted("socket", 0)
    bench.n_unread = 0
    assert [type(event) for event in bench.read()] == [Restored, Tokens]


def test_each_cause_is_told_once() -> None:
    bench = overwhelmed()
    bench.n_unread = SMALL.unread_messages
    bench.row(N, N + 1)
    bench.row(N + 1, N + 2)
    told = bench.read()
    assert {event.cause for event in told if isinstance(event, Demoted)} == {"reader", "socket"}
    assert len(told) == 2


def test_beyond_the_room_that_there_is_the_oldest_are_let_go_and_counted() -> None:
    room = SubscriberSettings(waiting_bytes=4 * STREAM_BYTES, held_bytes=4 * STREAM_BYTES)
    bench = StreamBench(room)
    for n in range(10):
        bench.row(0, 8, rid=f"c/{n}")
    assert bench.core.events.n_held_bytes <= room.held_bytes
    told = bench.read()
    assert told[0] == LetGo(7, 56)
    assert {event.rid for event in bench.of(Tokens)} == {"c/7", "c/8", "c/9"}
    bench.row(8, 9, "stop", rid="c/0")
    assert bench.read() == []
    assert not bench.asked


def test_nothing_is_held_of_streams_that_were_told_to_their_end() -> None:
    bench = StreamBench()
    for n in range(100):
        bench.row(0, 8, "stop", rid=f"c/{n}")
    bench.read()
    assert bench.core.events.n_held_bytes == bench.core.events.n_waiting_bytes == 0
    assert bench.core.n_open == 0


def test_news_are_bounded() -> None:
    bench = StreamBench()
    for _ in range(MAX_NEWS + 5):
        bench.core.events.say(Restored())
    assert bench.core.events.n_dropped == 5


@pytest.mark.parametrize("n_reads", [1, 7, 1000])
def test_no_token_is_told_twice_however_often_it_is_demoted(n_reads: int) -> None:
    bench = StreamBench(SMALL)
    n_tokens = 0
    for n in range(1000):
        bench.row(n_tokens, n_tokens + 3)
        n_tokens += 3
        if n % n_reads == 0:
            bench.read()
    bench.row(n_tokens, n_tokens, "length")
    bench.read()
    assert bench.text() == tokens_of(0, len(bench.text()))
    assert bench.finished(RID).tokens.tolist() == tokens_of(0, n_tokens)
    assert bool(bench.of(Demoted)) == (3 * n_reads > ROOM)
