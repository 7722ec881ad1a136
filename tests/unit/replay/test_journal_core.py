"""What counts as durable, and what happens when the disk is slow, full or has had enough."""

import pytest

from rolloutbus.replay.journal.core import (
    Begin,
    FinishSegment,
    JournalCore,
    JournalIdentity,
    JournalSettings,
    Write,
)
from rolloutbus.replay.journal.format import Found, Framer, scan
from rolloutbus.replay.journal.records import LostRecord, Stream
from tests.unit.replay.segments import MS, WALL_NS, S, Salts


def begun(**settings: float) -> JournalCore:
    core = JournalCore(JournalSettings(**settings), JournalIdentity("j"), Salts())  # type: ignore[arg-type]
    core.start(0, WALL_NS)
    core.synced()
    return core


def add(core: JournalCore, now_ns: int = 0, topic: bytes = b"t") -> bool:
    return core.append(lambda seq: Stream(seq, now_ns, topic, []), now_ns)


def test_a_record_is_durable_when_its_sync_has_ended_and_not_before() -> None:
    core = begun()
    assert core.durable == 0  # the head
    add(core)
    assert core.due(60 * MS, WALL_NS)
    add(core)
    assert core.durable == 0
    core.synced()
    assert core.durable == 1


def test_records_wait_for_each_other_but_not_longer_than_the_settings_say() -> None:
    core = begun()
    add(core, 0)
    add(core, 40 * MS)
    assert core.due(49 * MS, WALL_NS) == []
    assert core.due_in_s(49 * MS) == pytest.approx(0.001)
    (write,) = core.due(50 * MS, WALL_NS)
    assert isinstance(write, Write)


def test_a_mebibyte_does_not_wait() -> None:
    core = begun()
    add(core, topic=bytes(1 << 20))
    assert core.due_in_s(0) == 0.0
    assert core.due(0, WALL_NS)


def test_one_write_at_a_time() -> None:
    core = begun()
    add(core)
    assert core.due(S, WALL_NS)
    add(core)
    assert core.due(2 * S, WALL_NS) == []
    core.synced()
    assert core.due(2 * S, WALL_NS)


def test_a_segment_ends_by_its_size_and_by_its_age() -> None:
    for core, now_ns in ((begun(segment_bytes=100), S), (begun(segment_s=5.0), 5 * S)):
        add(core, topic=bytes(200))
        kinds = [type(each) for each in core.due(now_ns, WALL_NS)]
        assert kinds == [Write, FinishSegment, Begin, Write]


def test_what_has_no_room_is_counted_and_said_as_soon_as_there_is_room() -> None:
    core = begun(memory_bytes=1000)
    assert add(core, topic=bytes(2000))
    assert not add(core)
    assert not add(core)
    assert core.n_dropped == 2
    core.due(S, WALL_NS)
    core.synced()

    assert add(core)
    (write,) = core.due(2 * S, WALL_NS)

    assert isinstance(write, Write)
    first = next(scan(Framer(Salts()(8)), write.content, 0))
    assert isinstance(first, Found)
    assert isinstance(first.record, LostRecord)
    assert (first.record.source, first.record.count) == ("memory", 2)


def test_after_a_failed_write_nothing_is_written_any_more() -> None:
    core = begun()
    add(core)
    core.due(S, WALL_NS)
    core.failed("No space left on device")
    assert not add(core, 2 * S)
    assert core.due(3 * S, WALL_NS) == core.close(3 * S) == []
    assert (core.problem, core.durable) == ("No space left on device", 0)
