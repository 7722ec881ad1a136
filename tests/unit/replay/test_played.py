"""Whoever has missed rows of a replay gets exactly those that have been played."""

import pytest

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Deltas, Prefix, Repair, Repaired
from rolloutbus.replay.stand_in import Played
from tests.unit.replay.streams import floats, ints, published, row, step

RID, A1, A2 = "c/1", (1, 1), (1, 2)


def played(*bodies: Deltas, max_bytes: int = 1_000_000) -> Played:
    found = Played(max_bytes)
    for body in bodies:
        found.add(published(body))
    return found


def test_a_repair_brings_tokens_logprobs_and_versions_from_its_start_on() -> None:
    kept = played(
        row(RID, A1, 0, 5, 6), row(RID, A1, 2, 7, version=1), row(RID, A1, 3, 8, version=1)
    )
    found = kept.repaired(Repair(RID, A1, 1))
    assert found == Repaired(1, ints(6, 7, 8), floats(-6, -7, -8), [(0, 1), (1, 2)])


def test_the_columns_of_a_step_go_to_their_requests() -> None:
    other = "c/2"
    kept = played(step(row(RID, A1, 0, 5, 6), row(other, A2, 0, 7)), row(RID, A1, 2, 8))
    assert kept.repaired(Repair(other, A2, 0)) == Repaired(0, ints(7), floats(-7), [(0, 1)])
    assert kept.repaired(Repair(RID, A1, 2)) == Repaired(2, ints(8), floats(-8), [(0, 1)])


def test_a_copy_of_a_row_changes_nothing() -> None:
    kept = played(row(RID, A1, 0, 5), row(RID, A1, 0, 5))
    assert kept.repaired(Repair(RID, A1, 0)) == Repaired(0, ints(5), floats(-5), [(0, 1)])


def test_what_the_recorder_missed_is_never_made_up() -> None:
    kept = played(row(RID, A1, 0, 5), row(RID, A1, 4, 9))
    assert isinstance(kept.repaired(Repair(RID, A1, 0)), Problem)
    assert isinstance(kept.repaired(Repair(RID, A1, 2)), Problem)
    assert kept.repaired(Repair(RID, A1, 4)) == Repaired(4, ints(9), floats(-9), [(0, 1)])


def test_an_attempt_that_was_resumed_can_be_had_from_its_first_token() -> None:
    prefix = Prefix(ints(5, 6), floats(-5, -6), [(0, 2)])
    for kept in (played(), played(row(RID, A2, 2, 7, version=1))):
        kept.begins((RID, A2), prefix)
        kept.begins((RID, A2), prefix)  # sent again
        kept.add(published(row(RID, A2, 2, 7, version=1)))
        found = kept.repaired(Repair(RID, A2, 0))
        assert found == Repaired(0, ints(5, 6, 7), floats(-5, -6, -7), [(0, 2), (1, 1)])


def test_behaviour_logprobs_come_too_when_a_row_has_them() -> None:
    plain = row(RID, A1, 0, 5)
    cut = Deltas([RID], [A1], [1], [1], ints(6), floats(-6), [0], [], floats(-0.5))
    found = played(plain, cut).repaired(Repair(RID, A1, 0))
    assert isinstance(found, Repaired)
    assert found.behaviour_logprobs == floats(-5, -0.5)


def test_what_nobody_has_heard_of_or_what_is_not_played_yet_is_refused() -> None:
    kept = played(row(RID, A1, 0, 5))
    for repair in (Repair("c/9", A1, 0), Repair(RID, A2, 0), Repair(RID, A1, 2)):
        assert isinstance(kept.repaired(repair), Problem)


def test_the_attempts_played_longest_ago_are_forgotten_first() -> None:
    kept = played(*(row(f"c/{n}", A1, 0, 1, 2, 3) for n in range(9)), max_bytes=3 * 36)
    found = [isinstance(kept.repaired(Repair(f"c/{n}", A1, 0)), Repaired) for n in range(9)]
    assert found == [False] * 6 + [True] * 3


def test_columns_that_do_not_fit_together_are_refused() -> None:
    bad = Deltas([RID], [A1], [0], [2], ints(5), floats(-5), [0])
    with pytest.raises(RemoteProtocolError):
        played(bad)
    played().add(Entry("idle"))
