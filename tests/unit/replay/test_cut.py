"""A replay of one request has its rows and no others."""

from typing import cast

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.generation import Deltas, Idle
from rolloutbus.replay.player_core import cut
from tests.unit.replay.streams import published, row, step

RID, OTHER, A = "c/1", "c/2", (1, 1)


def test_rows_of_others_are_cut_out_of_every_column() -> None:
    whole = step(
        row(OTHER, A, 0, 1, 2),
        row(RID, A, 4, 5, version=3),
        row(OTHER, A, 2),
        row(RID, A, 5, 6, 7),
        finishes=[(0, "stop"), (3, "length")],
    )
    (entry,) = cut([published(whole)], {RID})
    expected = step(row(RID, A, 4, 5, version=3), row(RID, A, 5, 6, 7), finishes=[(1, "length")])
    assert unpack(entry) == expected
    assert (entry.route, entry.epoch, entry.kind) == ("w0", "e.1", "deltas")


def test_a_message_about_nothing_else_stays_as_it_was() -> None:
    entry = published(row(RID, A, 0, 1))
    assert cut([entry], {RID}) == [entry]


def test_idle_heartbeats_tell_of_the_chosen_streams_only() -> None:
    (entry,) = cut([published(Idle([OTHER, RID], [A, A], [3, 4]))], {RID})
    assert cast("Idle", unpack(entry)) == Idle([RID], [A], [4])


def test_nothing_is_left_of_messages_about_others() -> None:
    entries = [published(row(OTHER, A, 0, 1)), published(Idle([], [], [])), Entry("finished", RID)]
    assert cut(entries, {RID}) == []


def test_columns_that_do_not_fit_together_are_left_out() -> None:
    bad = Deltas([RID, OTHER], [A], [0], [1], b"1234", b"1234", [0])
    assert cut([published(bad)], {RID}) == []
