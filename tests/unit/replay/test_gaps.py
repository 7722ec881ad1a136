"""Whatever did not come of a stream is told: which tokens of which attempt."""

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.generation import (
    Deltas,
    Generate,
    Generated,
    Idle,
    Prefix,
    SamplingParams,
)
from rolloutbus.replay.recorder_core import LAST_ROW_NS, RecordingGap, StreamGaps

RID = "c/1"
ATTEMPT = (1, 7)
KEY = (RID, ATTEMPT)


def row(seq: int, count: int, *, is_last: bool = False) -> Entry:
    columns = Deltas(
        rids=[RID],
        attempts=[ATTEMPT],
        seqs=[seq],
        counts=[count],
        tokens=bytes(4 * count),
        logprobs=bytes(4 * count),
        versions=[0],
        finishes=[(0, "stop")] if is_last else [],
    )
    return Entry("deltas", body=pack(columns))


def idle(n_tokens: int) -> Entry:
    return Entry("idle", body=pack(Idle([RID], [ATTEMPT], [n_tokens])))


def generate(n_prefix: int = 0) -> Entry:
    prefix = Prefix(bytes(4 * n_prefix), bytes(4 * n_prefix), [(0, n_prefix)]) if n_prefix else None
    return Entry(
        "generate", RID, ATTEMPT, body=pack(Generate(b"", SamplingParams(), prefix=prefix))
    )


def finished(n_tokens: int) -> Entry:
    result = Generated(bytes(4 * n_tokens), b"", [], "stop", 0, 1)
    return Entry("finished", RID, ATTEMPT, body=pack(result))


def missing(first: int, n: int) -> RecordingGap:
    return RecordingGap("stream", RID, ATTEMPT, first, n)


def test_a_jump_of_a_stream_and_a_tail_that_only_its_idle_heartbeat_shows_are_told_once() -> None:
    gaps = StreamGaps()
    assert gaps.published(row(0, 3)) == []
    assert gaps.published(row(5, 1)) == [missing(3, 2)]
    assert gaps.published(idle(9)) == [missing(6, 3)]
    assert gaps.published(row(2, 2)) == []  # a copy
    assert gaps.published(idle(9)) == []


def test_a_missing_beginning_shows_if_the_request_was_heard_before_or_after() -> None:
    before, after, never = StreamGaps(), StreamGaps(), StreamGaps()
    assert before.sent(generate()) == []
    assert before.published(row(4, 1)) == [missing(0, 4)]
    assert after.published(row(4, 1)) == []
    assert after.sent(generate()) == [missing(0, 4)]
    assert after.sent(generate()) == []
    assert never.published(row(4, 1)) == []


def test_a_resumed_attempt_begins_behind_its_prefix() -> None:
    gaps = StreamGaps()
    gaps.sent(generate(n_prefix=4))
    assert gaps.published(row(4, 2)) == []


def test_a_last_row_that_does_not_follow_its_result_is_missing_after_a_while() -> None:
    gaps = StreamGaps()
    gaps.sent(generate())
    gaps.published(row(0, 3))
    gaps.finished(finished(10), 0)
    assert gaps.tick(LAST_ROW_NS - 1) == []
    assert gaps.tick(LAST_ROW_NS) == [missing(3, 7)]
    assert gaps.tick(2 * LAST_ROW_NS) == []


def test_a_last_row_that_comes_after_its_result_is_not_missing() -> None:
    gaps = StreamGaps()
    gaps.sent(generate())
    gaps.finished(finished(3), 0)
    assert gaps.published(row(0, 3, is_last=True)) == []
    assert gaps.tick(LAST_ROW_NS) == []
