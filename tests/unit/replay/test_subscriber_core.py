"""Whatever is lost on the way is repaired, or told to be lost; and every stream ends."""

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.generation import Generate, Repaired, SamplingParams
from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.stream.core import GONE_S, MAX_TRIES, SILENT_S, UNDECIDED_S
from rolloutbus.replay.stream.event_queue import SubscriberSettings
from rolloutbus.replay.stream.events import (
    Finished,
    GapFound,
    GapLost,
    GapRepaired,
    Tokens,
    WorkerJoined,
    WorkerLeft,
)
from tests.unit.replay.stream_bench import (
    BUSY,
    FIRST,
    NOT_HERE,
    RID,
    SECOND,
    Execution,
    StreamBench,
    tokens_of,
)

ANEW = Execution(SECOND, "w1", salt=7)


@pytest.fixture
def bench() -> StreamBench:
    return StreamBench()


def test_rows_are_told_as_they_come_and_the_end_brings_all_of_them(bench: StreamBench) -> None:
    bench.row(0, 3)
    (first,) = bench.read()
    bench.row(3, 5, version=1)
    bench.row(5, 6, "stop", version=1)
    bench.read()

    assert isinstance(first, Tokens)
    assert (first.start, first.tokens.tolist(), first.version) == (0, tokens_of(0, 3), 0)
    assert bench.text() == tokens_of(0, 6)
    end = bench.finished()
    assert (end.tokens.tolist(), end.version_runs) == (tokens_of(0, 6), [(0, 3), (1, 3)])
    assert (end.finish_reason, end.n_missing) == ("stop", 0)
    assert not bench.asked


def test_a_reader_that_was_away_gets_what_came_in_one_piece(bench: StreamBench) -> None:
    for start in range(50):
        bench.row(start, start + 1)
    (event,) = bench.read()
    assert isinstance(event, Tokens)
    assert event.tokens.tolist() == tokens_of(0, 50)


def test_who_comes_late_asks_for_the_beginning(bench: StreamBench) -> None:
    bench.row(7, 9)
    assert [event for event in bench.read() if not isinstance(event, GapFound)] == []
    ask = bench.answer(9)
    bench.read()

    assert (ask.worker, ask.body.rid, ask.body.attempt, ask.body.start) == ("w0", RID, FIRST, 0)
    assert bench.text() == tokens_of(0, 9)
    assert [(gap.start, gap.stop) for gap in bench.of(GapFound)] == [(0, 7)]
    assert [(gap.start, gap.stop) for gap in bench.of(GapRepaired)] == [(0, 7)]


def test_a_lost_row_is_repaired_with_one_question_and_its_neighbours_wait(
    bench: StreamBench,
) -> None:
    bench.row(0, 2)
    bench.row(4, 6)
    bench.row(6, 8, "length")
    bench.read()
    assert bench.text() == tokens_of(0, 2)
    assert len(bench.asked) == 1
    bench.answer(4)
    bench.read()
    assert bench.text() == tokens_of(0, 8)
    assert bench.finished().tokens.tolist() == tokens_of(0, 8)


def test_a_lost_tail_shows_in_the_heartbeat(bench: StreamBench) -> None:
    bench.row(0, 2)
    bench.idle({RID: 2})
    assert not bench.asked
    bench.idle({RID: 5})
    bench.answer(6)  # it has gone on meanwhile
    bench.row(5, 7)
    bench.read()
    assert bench.text() == tokens_of(0, 7)


def test_a_stream_of_which_only_heartbeats_came_is_followed(bench: StreamBench) -> None:
    bench.idle({RID: 3})
    bench.answer(3)
    bench.read()
    assert bench.text() == tokens_of(0, 3)


def test_a_lost_last_row_shows_in_a_heartbeat_that_does_not_list_the_stream(
    bench: StreamBench,
) -> None:
    bench.row(0, 2)
    bench.idle({"c/2": 0})
    bench.answer(4)
    bench.read()
    assert bench.finished().finish_reason is None
    assert bench.finished().tokens.tolist() == tokens_of(0, 4)


def test_an_ended_stream_that_the_worker_forgot_ends_with_what_is_held(bench: StreamBench) -> None:
    bench.row(0, 2)
    bench.idle({})
    bench.end(NOT_HERE)
    bench.read()
    assert bench.finished().finish_reason is None
    assert bench.finished().tokens.tolist() == tokens_of(0, 2)


def test_a_heartbeat_of_another_client_or_worker_ends_nothing(bench: StreamBench) -> None:
    bench.row(0, 2, rid="other/1")
    bench.row(0, 2, rid="c/5", by=Execution(worker="w1"))
    bench.idle({})
    bench.read()
    assert bench.of(Finished) == []
    assert not bench.asked


def test_what_cannot_be_repaired_is_told_where_it_is_missing(bench: StreamBench) -> None:
    bench.row(0, 2)
    bench.row(5, 6)
    bench.end(NOT_HERE)
    bench.row(6, 8, "stop")
    told = [event for event in bench.read() if isinstance(event, Tokens | GapLost)]

    assert [type(event) for event in told] == [Tokens, GapLost, Tokens]
    (lost,) = bench.of(GapLost)
    assert (lost.start, lost.stop, lost.why) == (2, 5, NOT_HERE.why)
    assert bench.finished().tokens.tolist() == [*tokens_of(0, 2), *tokens_of(5, 8)]
    assert bench.finished().n_missing == 3
    assert bench.core.counters.tokens_lost == 3


def test_a_repair_that_could_not_be_done_is_tried_again_a_few_times(bench: StreamBench) -> None:
    bench.row(3, 4)
    for n_tried in range(1, MAX_TRIES + 1):
        assert len(bench.asked) == 1, f"try {n_tried}"
        bench.end(BUSY)
        assert not bench.asked, "at once"
        bench.advance(2.0)
        bench.row(4 + n_tried - 1, 4 + n_tried)
    bench.read()
    assert not bench.asked
    assert [(gap.start, gap.stop) for gap in bench.of(GapLost)] == [(0, 3)]


def test_an_answer_that_brings_nothing_new_is_not_asked_for_for_ever(bench: StreamBench) -> None:
    bench.row(3, 4)
    for _ in range(MAX_TRIES):
        bench.answer(0)
        bench.advance(4.0)
    bench.read()
    assert not bench.asked
    assert len(bench.of(GapLost)) == 1


def test_so_many_repairs_at_once_and_the_others_in_turn() -> None:
    bench = StreamBench(SubscriberSettings(repairs_at_once=3))
    for n in range(10):
        bench.row(1, 2, "stop", rid=f"c/{n}")
    asked: list[str] = []
    while bench.asked:
        assert len(bench.asked) <= 3
        asked.append(bench.answer(2).body.rid)
    bench.read()
    assert asked == [f"c/{n}" for n in range(10)]
    assert len(bench.of(Finished)) == 10


def test_an_attempt_that_starts_again_makes_what_was_told_void(bench: StreamBench) -> None:
    bench.row(0, 4)
    bench.read()
    bench.row(0, 2, by=ANEW)
    bench.row(2, 3, "stop", by=ANEW)
    bench.read()
    assert bench.text() == bench.finished().tokens.tolist() == tokens_of(0, 3, salt=7)
    assert bench.finished().worker == "w1"


def test_an_attempt_that_goes_on_is_asked_what_it_goes_on_from(bench: StreamBench) -> None:
    bench.row(0, 6)
    bench.read()
    # Its client held four tokens; of the two sampled anew the first row was lost.
    bench.row(5, 6, by=ANEW)
    ask = bench.asked[0]
    assert (ask.worker, ask.body.start) == ("w1", 0)
    assert bench.read() == [] or bench.text() == tokens_of(0, 6)
    wanted = [*tokens_of(0, 4), *tokens_of(4, 6, salt=7)]
    bench.end(_repaired(wanted))
    bench.row(6, 7, "stop", by=ANEW)
    bench.read()
    wanted += tokens_of(6, 7, salt=7)
    assert bench.text() == bench.finished().tokens.tolist() == wanted


def test_tokens_beyond_what_a_new_attempt_holds_do_not_outlive_the_old_one(
    bench: StreamBench,
) -> None:
    bench.row(0, 6)
    bench.idle({RID: 4}, attempt=SECOND, worker="w1")
    bench.answer(4)
    bench.row(4, 4, "stop", by=Execution(attempt=SECOND, worker="w1"))
    bench.read()
    assert bench.finished().tokens.tolist() == tokens_of(0, 4)


def test_an_attempt_whose_beginning_nobody_tells_vouches_for_nothing_before(
    bench: StreamBench,
) -> None:
    bench.row(0, 4)
    bench.row(4, 6, by=ANEW)
    bench.end(NOT_HERE)
    bench.row(6, 7, "stop", by=ANEW)
    bench.read()
    assert bench.finished().tokens.tolist() == tokens_of(4, 7, salt=7)
    assert bench.finished().n_missing == 4


def test_rows_of_executions_that_are_over_do_not_count(bench: StreamBench) -> None:
    bench.row(0, 2, by=Execution(attempt=SECOND))
    bench.row(0, 1, by=Execution(attempt=FIRST, worker="w1", salt=3))
    bench.row(2, 3, "stop", by=Execution(attempt=SECOND))
    bench.row(0, 9, by=Execution(attempt=FIRST, worker="w1", salt=3))
    bench.idle({RID: 9}, attempt=SECOND)
    bench.read()
    assert bench.finished().tokens.tolist() == tokens_of(0, 3)
    assert bench.core.n_open == 0
    assert not bench.asked


def test_a_request_that_was_stopped_and_goes_on_is_told_anew(bench: StreamBench) -> None:
    bench.row(0, 2, "abort")
    bench.read()
    bench.row(2, 4, "stop", by=Execution(attempt=SECOND, worker="w1"))
    bench.answer(4)
    bench.read()
    assert [event.finish_reason for event in bench.of(Finished)] == ["abort", "stop"]
    assert bench.of(Finished)[1].tokens.tolist() == tokens_of(0, 4)


def test_a_stream_that_falls_silent_is_asked_for_and_then_given_up(bench: StreamBench) -> None:
    bench.row(0, 2)
    bench.advance(SILENT_S + 1.5)
    bench.end(NOT_HERE)
    bench.read()
    assert bench.of(Finished) == []  # it may yet go on elsewhere
    bench.advance(GONE_S)
    bench.read()
    assert bench.finished().finish_reason is None
    bench.row(2, 3)  # and if it does after all, it is followed
    assert bench.core.n_open == 1


def test_who_was_frozen_does_not_take_its_own_silence_for_that_of_others(
    bench: StreamBench,
) -> None:
    bench.row(0, 2)
    bench.now += 60.0
    bench.advance(0.25)
    bench.read()
    assert not bench.asked
    assert bench.of(Finished) == []


def test_members_that_come_go_and_come_again_are_told(bench: StreamBench) -> None:
    def members(*epochs: tuple[str, str]) -> None:
        listed = [Member(name, epoch, "ipc:///x", "ready", 0, "p") for name, epoch in epochs]
        bench.core.members(listed, bench.now)

    members(("w0", "a.1"), ("w1", "b.1"))
    members(("w0", "a.1"), ("w1", "b.1"))
    members(("w1", "b.2"))
    assert bench.read() == [
        WorkerJoined("w0", "a.1", "p"),
        WorkerJoined("w1", "b.1", "p"),
        WorkerLeft("w0", "a.1"),
        WorkerLeft("w1", "b.1"),
        WorkerJoined("w1", "b.2", "p"),
    ]


def test_only_the_requests_that_were_named_are_followed() -> None:
    bench = StreamBench(rids=["c/2"])
    for rid in ("c/1", "c/2", "c/3"):
        bench.row(0, 1, "stop", rid=rid)
    bench.read()
    assert [event.rid for event in bench.of(Finished)] == ["c/2"]


def asked_for(rid: str, session: str) -> Entry:
    body = Generate(b"\1\0\0\0", SamplingParams())
    return Entry("generate", rid, place=Placement("p", session=session), body=pack(body))


def test_a_session_is_told_whether_its_word_comes_before_its_rows_or_after() -> None:
    bench = StreamBench(wanted=Filter(session=["s"]))
    bench.core.tapped([asked_for("c/1", "s"), asked_for("c/2", "t")], bench.now)
    for rid in ("c/1", "c/2", "c/3", "c/4"):
        bench.row(1, 2, rid=rid)
    assert [ask.body.rid for ask in bench.asked] == ["c/1"]
    bench.answer(2)
    bench.row(0, 1, "stop", rid="c/5")
    bench.asked += bench.core.tapped([asked_for("c/3", "s"), asked_for("c/5", "s")], bench.now)
    bench.answer(2)
    bench.row(0, 1, "stop", rid="c/6")
    bench.advance(UNDECIDED_S + 1)
    bench.core.tapped([asked_for("c/6", "s")], bench.now)
    bench.read()
    assert {event.rid for event in bench.of(Tokens)} == {"c/1", "c/3", "c/5"}
    assert [event.rid for event in bench.of(Finished)] == ["c/5"]


def test_malformed_rows_are_counted_and_end_nothing(bench: StreamBench) -> None:
    bench.publish(Entry("deltas", body=pack(Member("a", "b", "c", "d", 0, "e"))), RID)
    bench.row(0, 1, "stop")
    bench.read()
    assert bench.core.counters.malformed == 1
    assert len(bench.of(Finished)) == 1


def _repaired(tokens: list[int]) -> Repaired:
    raw = b"".join(each.to_bytes(4, "little") for each in tokens)
    return Repaired(0, raw, bytes(len(raw)), [(0, len(tokens))])
