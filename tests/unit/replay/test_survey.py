"""A journal is read through before it is played: whose streams, how much, how long."""

import msgspec

from rolloutbus.bus.wire.messages.membership import Member
from rolloutbus.replay.journal.records import Record
from rolloutbus.replay.player_core import JournalSurvey, as_of
from tests.unit.replay.streams import ended, row, stream, tapped, told

ROW = row("c/1", (1, 1), 0, 5)
W0 = Member("w0", "e.1", "ipc:///live/0", "ready", 3, "p")
W9 = Member("w9", "e.9", "ipc:///live/9", "ready", 0, "p")


def test_those_who_published_are_known_as_they_were_first_told_of() -> None:
    records: list[Record] = [
        told(1, W0, W9),
        stream(2, ROW, at_ms=1),
        told(3, msgspec.structs.replace(W0, version=4)),
        stream(4, ROW, worker="w1", at_ms=250),
        tapped(300, "sent", ended("c/1", 5)),
    ]
    found = JournalSurvey()
    for record in records:
        found.add(record)
    assert list(found.workers) == ["w0", "w1"]
    assert found.workers["w0"] == W0
    assert (found.workers["w1"].name, found.workers["w1"].epoch) == ("w1", "e.1")
    assert (found.n_messages, found.n_tapped, round(found.length_s, 6)) == (2, 1, 0.299)


def test_an_empty_journal_has_nobody() -> None:
    assert (JournalSurvey().workers, JournalSurvey().length_s) == ({}, 0.0)


def test_a_worker_that_left_is_stale_and_keeps_its_place() -> None:
    played = [msgspec.structs.replace(each, stream=f"ipc:///here/{each.name}") for each in (W0, W9)]
    changed = msgspec.structs.replace(W9, version=7, epoch="e.10")
    first, second = as_of(played, [changed])
    assert (first.state, first.stream) == ("stale", "ipc:///here/w0")
    assert (second.version, second.epoch, second.stream) == (7, "e.10", "ipc:///here/w9")
