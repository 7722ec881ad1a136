"""What is heard becomes records, in order; what is not wanted does not."""

from collections.abc import Iterable

from rolloutbus.bus.streams.tap import TapEvent, TapMark
from rolloutbus.bus.wire.codec import pack, topic_of
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.generation import Idle
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.journal.records import LostRecord, Record, Stream, Tap, ToldRecord
from rolloutbus.replay.recorder_core import UNDECIDED_NS, Build, RecorderCore


def topic(n: int, event: TapEvent = "received") -> bytes:
    return TapMark(event, n, 12.5, 3, "trainer").topic


def idle(*rids: str) -> Entry:
    return Entry("idle", body=pack(Idle(list(rids), [(1, 1)] * len(rids), [0] * len(rids))))


def records(builds: Iterable[Build]) -> list[Record]:
    return [build(seq, 99) for seq, build in enumerate(builds)]


def test_everything_is_kept_as_it_was_heard() -> None:
    core = RecorderCore(Filter())
    entries = [Entry("abort", "c/1"), Entry("client_beat")]
    assert records(core.tapped(topic(0), entries, 0)) == [
        Tap(0, 99, "received", 0, 12.5, 3, "trainer", entries)
    ]
    assert records(core.published(b"t" * 16, [idle()], 0)) == [Stream(0, 99, b"t" * 16, [idle()])]
    assert records(core.told([Entry("lease"), Entry("members")])) == [
        ToldRecord(0, 99, [Entry("members")])
    ]


def test_what_the_tap_has_lost_stands_before_what_came_after_it() -> None:
    core = RecorderCore(Filter())
    core.tapped(topic(0), [], 0)
    lost, tap = records(core.tapped(topic(4), [], 0))
    assert lost == LostRecord(0, 99, "tap", "", (0, 0), 1, 3)
    assert isinstance(tap, Tap)
    assert core.heard.lost_tap == 3


def test_a_tap_may_have_run_before_us_and_another_router_counts_from_0() -> None:
    core = RecorderCore(Filter())

    def n_lost(n: int) -> int:
        return sum(isinstance(each, LostRecord) for each in records(core.tapped(topic(n), [], 0)))

    assert [n_lost(n) for n in (41, 42, 45)] == [0, 0, 1]
    core.another_router()
    assert n_lost(3) == 0
    assert n_lost(0) == 0  # or its tap is the first to say so
    assert n_lost(2) == 1


def test_a_topic_that_is_none_is_counted() -> None:
    core = RecorderCore(Filter())
    assert core.tapped(b"short", [], 0) == []
    assert core.heard.malformed == 1


def test_rows_that_overtake_the_word_of_their_request_are_kept() -> None:
    core = RecorderCore(Filter(session=["s"]))
    rows = topic_of("c")
    assert core.published(rows, [idle("c/1")], 0) == []
    assert core.published(rows, [idle("c/2")], 0) == []
    generate = Entry("generate", "c/1", place=Placement("p", session="s"))

    tap, stream = records(core.tapped(topic(0), [generate], 5))

    assert isinstance(tap, Tap)
    assert stream == Stream(1, 99, rows, [idle("c/1")])
    assert core.tick(UNDECIDED_NS) == []
    later = Entry("generate", "c/2", place=Placement("p", session="s"))
    assert len(records(core.tapped(topic(1), [later], UNDECIDED_NS))) == 1
