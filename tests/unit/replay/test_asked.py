"""Every request that was sampled to its end is there once, as its client sent it first."""

from rolloutbus.bus.wire.messages.generation import Prefix
from rolloutbus.replay.journal.records import Record
from rolloutbus.replay.trajectories import AnsweredRequests
from tests.unit.replay.streams import asked, ended, floats, ints, tapped

RID = "c/1"
PREFIX = Prefix(ints(5), floats(-5), [(0, 1)])


def test_a_request_comes_with_its_first_words_and_its_result() -> None:
    records = [
        tapped(1, "received", asked(RID)),
        tapped(2, "sent", asked(RID, attempt=1)),
        tapped(3, "received", asked(RID, prefix=PREFIX)),
        tapped(4, "received", ended(RID, 5, 6)),
        tapped(5, "sent", ended(RID, 5, 6)),
    ]
    (found,) = AnsweredRequests(records)
    assert (found.rid, found.generate.prefix, found.place.policy) == (RID, None, "p")
    assert found.result.tokens == ints(5, 6)


def test_copies_make_no_second_request() -> None:
    once: list[Record] = [tapped(1, "received", asked(RID)), tapped(2, "sent", ended(RID, 5))]
    assert len(list(AnsweredRequests(once * 2))) == 1


def test_what_ended_otherwise_or_began_before_the_recording_is_left_out() -> None:
    records = [
        tapped(1, "received", asked("c/2")),
        tapped(2, "sent", ended("c/2", kind="cancelled")),
        tapped(3, "sent", ended("c/3", 5)),
    ]
    requests = AnsweredRequests(records)
    assert list(requests) == []
    assert requests.n_unfinished == 1


def test_only_the_chosen_ones_are_read() -> None:
    records = [
        record
        for n in range(3)
        for record in (
            tapped(1, "received", asked(f"c/{n}")),
            tapped(2, "sent", ended(f"c/{n}", 5)),
        )
    ]
    assert [each.rid for each in AnsweredRequests(records, {"c/1"})] == ["c/1"]
