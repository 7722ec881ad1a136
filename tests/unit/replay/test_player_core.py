"""What is played is what was recorded, and only what has been played can be repaired."""

import msgspec

from rolloutbus.bus.actor.effects import SendAll
from rolloutbus.bus.streams.tap import mark_in
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Prefix, Repair, Repaired
from rolloutbus.bus.wire.messages.membership import Hello, Member
from rolloutbus.replay.player_core import THE_TAP, PlayerCore, Programme
from rolloutbus.replay.stand_in import Played
from tests.unit.replay.streams import (
    TOPIC,
    asked,
    ended,
    floats,
    ints,
    published,
    row,
    step,
    stream,
    tapped,
    told,
)

RID, OTHER, A = "c/1", "c/2", (1, 1)
W0 = Member("w0", "e.1", "ipc:///here/w0", "ready", 0, "p")


def player(tap: str = "", rids: frozenset[str] = frozenset()) -> PlayerCore:
    return PlayerCore(Programme([W0], tap, rids), "i" * 32)


def played_of(core: PlayerCore) -> Played:
    return core._played  # pyright: ignore[reportPrivateUsage]


def test_a_published_message_is_played_as_it_was_by_the_one_who_published_it() -> None:
    record = stream(5, row(RID, A, 0, 5), at_ms=70)
    core = player()
    first = core.step(stream(4, row(RID, A, 0, 5), at_ms=20))
    found = core.step(record)
    assert first.at_s == 0.0
    assert round(found.at_s, 6) == 0.05
    assert found.message == ("w0", TOPIC, record.entries)


def test_the_tap_is_played_with_its_marks_if_there_is_one() -> None:
    record = tapped(3, "sent", ended(RID, 5))
    assert player().step(record).message is None
    message = player(tap="ipc:///here/tap").step(record).message
    assert message is not None
    assert (message.publisher, message.entries) == (THE_TAP, record.entries)
    mark = mark_in(message.topic)
    assert (mark.event, mark.n, mark.at, mark.connection, mark.name) == ("sent", 3, 1.5, 1, "c")


def test_of_chosen_requests_only_their_rows_are_played() -> None:
    core = player(rids=frozenset({RID}))
    both = stream(1, step(row(RID, A, 0, 5), row(OTHER, A, 0, 6)))
    message = core.step(both).message
    assert message is not None
    assert message.entries == [published(step(row(RID, A, 0, 5)))]
    assert core.step(stream(2, row(OTHER, A, 1, 6))).message is None


def test_who_was_not_announced_is_not_played() -> None:
    assert player().step(stream(1, row(RID, A, 0, 5), worker="w7")).message is None


def test_rows_can_be_repaired_once_they_are_out() -> None:
    core = player()
    message = core.step(stream(1, row(RID, A, 0, 5))).message
    assert isinstance(played_of(core).repaired(Repair(RID, A, 0)), Problem)
    assert message is not None
    core.published(message)
    assert isinstance(played_of(core).repaired(Repair(RID, A, 0)), Repaired)


def test_a_resumed_attempt_can_be_repaired_from_its_first_token() -> None:
    core = player()
    prefix = Prefix(ints(5), floats(-5), [(0, 1)])
    core.step(tapped(1, "sent", asked(RID, prefix=prefix, attempt=2)))
    message = core.step(stream(2, row(RID, (1, 2), 1, 6))).message
    assert message is not None
    core.published(message)
    assert played_of(core).repaired(Repair(RID, (1, 2), 0)) == Repaired(
        0, ints(5, 6), floats(-5, -6), [(0, 2)]
    )


def test_listeners_hear_how_workers_changed_but_not_of_what_stayed_the_same() -> None:
    core = player()
    core.router.receive(
        Peer(b"x"), [Entry("hello", body=pack(Hello("client", "ann", "f" * 32)))], 1.0
    )
    elsewhere = msgspec.structs.replace(W0, stream="ipc:///live/w0")
    assert core.step(told(1, elsewhere)).effects == []
    (effect,) = core.step(told(2, msgspec.structs.replace(elsewhere, version=2))).effects
    assert isinstance(effect, SendAll)
    assert [entry.kind for entry in effect.entries] == ["members"]
    assert [each.version for each in core.router.members] == [2]
    assert core.router.members[0].stream == W0.stream


def test_bodies_that_break_their_type_are_played_and_counted() -> None:
    core = player()
    record = msgspec.structs.replace(
        stream(1, row(RID, A, 0, 5)), entries=[Entry("deltas", route="w0")]
    )
    message = core.step(record).message
    assert message is not None
    core.published(message)
    assert core.n_malformed == 1
