"""A player answers as a router does, so far as there is anything to answer."""

from typing import cast

import msgspec

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.wire.codec import pack, unpack, unpack_fleet, unpack_result
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.control import FleetStatus, Status
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Repair, Repaired
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Goodbye,
    Hello,
    Lease,
    Member,
    Members,
    Welcome,
)
from rolloutbus.replay.stand_in import SILENT_S, Effect, Played, StandIn
from tests.unit.replay.streams import asked, floats, ints, published, row

ANN, BOB = Peer(b"\x01ann"), Peer(b"\x01bob")
MEMBERS = [Member("w0", "e.1", "ipc:///tmp/w0", "ready", 3, "p")]
HELLO = Entry("hello", body=pack(Hello("client", "ann", "f" * 32)))


class Desk:
    """A stand-in that has played two tokens of one request."""

    def __init__(self) -> None:
        played = Played()
        played.add(published(row("c/1", (1, 1), 0, 5, 6)))
        self.router = StandIn("i" * 32, MEMBERS, played, tap="ipc:///tmp/tap")

    def say(self, *entries: Entry, peer: Peer = ANN, now: float = 1.0) -> list[Entry]:
        return said(self.router.receive(peer, entries, now), peer)

    def ask(self, kind: str, body: msgspec.Struct, route: str = "") -> Entry:
        """The one ending of a command of somebody who has said hello."""
        self.say(HELLO)
        (ending,) = self.say(Entry(kind, "ann/1", route=route, deadline_ms=100, body=pack(body)))
        assert ending.rid == "ann/1"
        return ending


def said(effects: list[Effect], peer: Peer) -> list[Entry]:
    found = [each for each in effects if isinstance(each, SendAll) and each.peer == peer]
    return [entry for each in found for entry in each.entries]


def code_of(entry: Entry) -> str:
    return f"{entry.kind}: {cast('Problem', unpack(entry)).code}"


def test_a_hello_is_answered_with_where_streams_and_tap_are_played() -> None:
    (answer,) = Desk().say(HELLO)
    welcome = cast("Welcome", unpack(answer))
    assert (welcome.members, welcome.tap) == (MEMBERS, "ipc:///tmp/tap")


def test_heartbeats_are_answered_so_that_listeners_stay() -> None:
    desk = Desk()
    desk.say(HELLO)
    (answer,) = desk.say(Entry("client_beat", body=pack(ClientHeartbeat(7))))
    assert cast("Lease", unpack(answer)).seq == 7


def test_a_client_of_an_earlier_player_is_told_a_higher_epoch() -> None:
    hello = Hello("client", "ann", "f" * 32, router_epoch=5, router_instance="other")
    (answer,) = Desk().say(Entry("hello", body=pack(hello)))
    assert cast("Welcome", unpack(answer)).router_epoch == 6


def test_who_did_not_say_hello_is_told_to() -> None:
    (answer,) = Desk().say(Entry("client_beat", body=pack(ClientHeartbeat(1))))
    assert answer.kind == "dismissed"


def test_a_worker_has_nothing_to_do_here() -> None:
    (answer,) = Desk().say(Entry("hello", body=pack(Hello("worker", "w9", "f" * 32))))
    assert answer.kind == "dismissed"


def test_a_repair_brings_what_has_been_played() -> None:
    ending = Desk().ask("repair", Repair("c/1", (1, 1), 1), "worker:w0")
    (outcome,) = unpack_fleet(ending).results
    found = msgspec.msgpack.decode(outcome.body, type=Repaired)
    assert (outcome.worker, outcome.kind) == ("w0", "finished")
    assert found == Repaired(1, ints(6), floats(-6), [(0, 1)])


def test_a_repair_of_what_was_not_played_is_refused_by_its_worker() -> None:
    ending = Desk().ask("repair", Repair("c/9", (1, 1), 0), "worker:w0")
    assert [each.kind for each in unpack_fleet(ending).results] == ["refused"]
    assert code_of(Desk().ask("repair", Repair("c/1", (1, 1), 0), "worker:w7")) == (
        "refused: unknown_worker"
    )


def test_the_status_names_the_workers_that_are_played() -> None:
    status = cast("FleetStatus", unpack_result("status", Desk().ask("status", Status())))
    assert [(each.name, each.version, each.engine) for each in status.workers] == [
        ("w0", 3, "replay")
    ]
    assert status.n_clients == 1


def test_nothing_can_be_asked_of_a_recording() -> None:
    desk = Desk()
    desk.say(HELLO)
    (ending,) = desk.say(asked("ann/2"))
    assert code_of(ending) == "refused: forbidden"


def test_garbage_is_counted_and_the_next_entry_is_read() -> None:
    desk = Desk()
    heartbeat = Entry("client_beat", body=pack(ClientHeartbeat(1)))
    answers = desk.say(HELLO, Entry("client_beat", body=pack(Goodbye("x"))), heartbeat)
    assert [each.kind for each in answers] == ["welcome", "lease"]
    assert desk.router.n_malformed == 1


def test_everybody_hears_of_a_change_and_nobody_of_those_who_left() -> None:
    desk = Desk()
    desk.say(HELLO)
    desk.say(HELLO, peer=BOB)
    desk.say(Entry("goodbye", body=pack(Goodbye())), peer=BOB)
    changed = [msgspec.structs.replace(MEMBERS[0], state="stale")]
    effects = desk.router.told(changed)
    (entry,) = said(effects, ANN)
    assert cast("Members", unpack(entry)).members == changed
    assert said(effects, BOB) == []


def test_who_is_silent_for_long_is_forgotten() -> None:
    desk = Desk()
    desk.say(HELLO, now=1.0)
    desk.say(HELLO, peer=BOB, now=20.0)
    assert desk.router.tick(2.0 + SILENT_S) == [ForgetPeer(ANN)]
    assert desk.router.n_clients == 1
