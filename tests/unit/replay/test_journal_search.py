"""Requests, sessions, versions and times are found, packed or not."""

from pathlib import Path

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.stream import Deltas
from rolloutbus.bus.wire.messages.weights import CommitUpdate
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Record, Stream, Tap
from rolloutbus.replay.journal.search import JournalQuery, find
from tests.unit.replay.segments import MS, Desk

SMALL = JournalSettings(segment_bytes=2_000)


def deltas(rid: str, version: int) -> Entry:
    body = Deltas([rid], [(1, 1)], [0], [1], bytes(4), bytes(4), [version])
    return Entry("deltas", body=pack(body))


def written(directory: Path, *, packs: bool) -> list[Record]:
    desk = Desk(directory, SMALL, packs=packs)
    for i in range(40):
        rid = f"c/{i}"
        asked = Entry("generate", rid, place=Placement("p", session=f"s{i % 5}"))
        desk.append(Tap, "received", i, 0.0, 1, "c", [asked])
        desk.append(Stream, b"t", [deltas(rid, i // 10)])
        desk.flush()
    commit = Entry("commit_update", "t/1@w0", body=pack(CommitUpdate("p", 3, "keep")))
    desk.append(Tap, "sent", 99, 0.0, 2, "w0", [commit])
    desk.close()
    return list(Journal(directory))


@pytest.mark.parametrize("state", ["plain", "packed", "index lost"])
def test_only_what_is_wanted_is_found_and_all_of_it(tmp_path: Path, state: str) -> None:
    records = written(tmp_path, packs=state != "plain")
    if state == "index lost":
        for index in tmp_path.glob("*.idx"):
            index.unlink()

    def found(wanted: JournalQuery) -> list[str]:
        return [
            f"{each.entries[0].kind} {each.seq}"
            for each in find(tmp_path, wanted)
            if isinstance(each, Tap | Stream)
        ]

    def all_of(*numbers: int) -> list[str]:
        said = {f"c/{i}": deltas(f"c/{i}", i // 10) for i in numbers}
        return [
            f"{entry.kind} {each.seq}"
            for each in records
            if isinstance(each, Tap | Stream)
            for entry in each.entries
            if entry.rid in said or entry in said.values()
        ]

    assert found(JournalQuery(frozenset({"c/7", "c/31"}))) == all_of(7, 31)
    assert found(JournalQuery(session="s2")) == all_of(*range(2, 40, 5))
    of_version = found(JournalQuery(version=3))
    assert [each.split()[0] for each in of_version] == ["deltas"] * 10 + ["commit_update"]
    assert found(JournalQuery(frozenset({"c/40"}))) == found(JournalQuery(session="none")) == []


def test_a_time_is_found_between_its_ends(tmp_path: Path) -> None:
    records = written(tmp_path, packs=True)
    since, until = records[20].at_ns, records[20].at_ns + 180 * MS
    wanted = [each for each in records if since <= each.at_ns <= until]
    assert list(find(tmp_path, JournalQuery(since_ns=since, until_ns=until))) == wanted
    assert len(wanted) > 4
