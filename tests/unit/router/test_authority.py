"""What a key may say to the router, by its role, its names and its sessions."""

import msgspec
import pytest

from rolloutbus.bus.security.principals import KINDS_OF, ROLES, Principal
from rolloutbus.bus.transport.endpoints import with_key
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.commands import KINDS
from rolloutbus.bus.wire.entry import Entry, Peer, Placement
from rolloutbus.bus.wire.messages.control import Pause, Shutdown, Status
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import OpenSession, Repair
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Goodbye,
    Heartbeat,
    Hello,
    StoreFacts,
    WorkerFacts,
)
from rolloutbus.bus.wire.messages.weights import GetWeights
from rolloutbus.router.events import Received, Revoked
from tests.unit.router.harness import Bus, SimPeer

WORKER_KEY = "ee" * 32
SAID_BY_ROUTERS_STORES_AND_HOSTS = {
    "abort_update", "allow_list", "chunk", "commit_update", "delta", "deltas", "dismissed",
    "engine_beat", "engine_failed", "engine_ready", "engine_starting", "enrolled", "extras",
    "fenced", "idle", "intent", "lease", "lost",
    "manifest", "members", "policy_aborted", "prepare_update", "queued", "record_commit",
    "session_moved", "update_progress", "welcome",
}  # fmt: skip
SAID_TO_BULK_SOCKETS = {"pull_chunk", "pull_delta", "pull_manifest", "push_chunk"}


class KeyedPeer(SimPeer):
    """A connection whose key is known."""

    def __init__(self, bus: Bus, principal: Principal) -> None:
        super().__init__(bus, principal.name)
        self.principal = principal

    def say(self, *entries: Entry) -> None:
        self.bus.reachable.add(self.peer)
        core, now = self.bus.core, self.bus.now
        self.bus.apply(core.handle(Received(self.peer, list(entries), self.principal), now))

    def hello(self, role: str = "client", name: str = "", served: str = "", bulk: str = "") -> None:
        facts = {
            "client": {},
            "worker": {
                "worker": WorkerFacts("default", served, 4, 4096, 100, "fake", [], bulk=bulk)
            },
            "store": {"store": StoreFacts(served)},
        }[role]
        hello = Hello(role, name or self.principal.name, "c" * 32, "c" * 32 + ".1", **facts)  # type: ignore[arg-type]
        self.say(Entry("hello", body=pack(hello)))

    def heartbeat(self) -> None:
        self.say(Entry("client_beat", body=pack(ClientHeartbeat(1))))

    def ask(
        self,
        kind: str,
        body: bytes | None = None,
        *,
        rid: str = "",
        session: str = "",
        route: str = "",
    ) -> str:
        rid = rid or f"{self.principal.name}/1"
        place = Placement("default", session=session)
        raw = pack(Status()) if body is None else body
        self.say(Entry(kind, rid, route=route, deadline_ms=10_000, place=place, body=raw))  # type: ignore[arg-type]
        return rid

    def repair(self, rid: str, route: str = "worker:w0") -> None:
        body = pack(Repair(rid, (1, 1), 0))
        self.say(
            Entry("repair", f"{self.principal.name}/1", route=route, deadline_ms=9000, body=body)
        )

    def refusal(self) -> str:
        (entry,) = self.take("refused")
        body = unpack(entry)
        assert isinstance(body, Problem)
        assert body.outcome == "not_started"
        return body.code

    def dismissal(self) -> str:
        (entry,) = self.take("dismissed")
        body = unpack(entry)
        assert isinstance(body, Dismissed)
        return body.code


def principal(role: str, name: str = "ann", **limits: list[str]) -> Principal:
    return Principal(f"{sum(name.encode()):064x}", name, role, **limits)  # type: ignore[arg-type]


def joined(bus: Bus, role: str, name: str = "ann", **limits: list[str]) -> KeyedPeer:
    peer = KeyedPeer(bus, principal(role, name, **limits))
    peer.hello()
    assert peer.take("welcome")
    return peer


@pytest.fixture
def bus() -> Bus:
    return Bus()


def test_every_kind_is_said_by_some_role_or_by_nobody_who_connects_to_a_router() -> None:
    by_roles = frozenset[str]().union(*KINDS_OF.values())
    others = SAID_BY_ROUTERS_STORES_AND_HOSTS | SAID_TO_BULK_SOCKETS
    assert set(KINDS) <= by_roles | others
    assert not by_roles & others


@pytest.mark.parametrize("role", ["client", "trainer", "admin"])
def test_client_roles_generate(bus: Bus, role: str) -> None:
    bus.worker()
    peer = joined(bus, role)
    peer.ask("generate")
    bus.advance(0.5)
    assert not peer.take("refused", "dismissed")


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("subscriber", "generate"),
        ("subscriber", "abort"),
        ("subscriber", "server_info"),
        ("client", "pause"),
        ("client", "abort_policy"),
        ("client", "publish_version"),
        ("client", "shutdown"),
        ("client", "record_commit"),
        ("trainer", "shutdown"),
        ("admin", "commit_update"),
    ],
)
def test_command_beyond_the_role_is_refused_and_counted(bus: Bus, role: str, kind: str) -> None:
    peer = joined(bus, role)
    peer.ask(kind)
    assert peer.refusal() == "forbidden"
    assert bus.counters["forbidden"] == 1


@pytest.mark.parametrize(
    ("role", "kind", "body"),
    [("trainer", "pause", Pause()), ("admin", "shutdown", Shutdown())],
)
def test_role_gives_the_commands_that_are_its_own(
    bus: Bus, role: str, kind: str, body: Pause | Shutdown
) -> None:
    worker = bus.worker()
    peer = joined(bus, role)
    peer.say(Entry(kind, "ann/1", route="fleet", deadline_ms=9000, body=pack(body)))
    assert worker.take(kind)


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (role, said)
        for role in ROLES
        for said in ("client", "worker", "store")
        if (said == "client") != (role in {"client", "trainer", "subscriber", "admin"})
        and role != said
    ],
)
def test_hello_in_another_role_is_dismissed(bus: Bus, role: str, said: str) -> None:
    peer = KeyedPeer(bus, principal(role))
    peer.hello(said, served=with_key("tcp://127.0.0.1:1", peer.principal.key))
    assert peer.dismissal() == "forbidden"
    assert len(bus.core.context.clients) == 0
    assert not list(bus.core.context.members)


def test_hello_under_a_foreign_name_is_dismissed_and_takes_nothing_from_its_owner(
    bus: Bus,
) -> None:
    ann = joined(bus, "client", "ann")
    thief = KeyedPeer(bus, principal("client", "eve"))
    thief.hello(name="ann")
    assert thief.dismissal() == "forbidden"
    ann.ask("status")
    assert ann.take("finished")


def test_worker_serves_an_endpoint_with_its_own_key_only(bus: Bus) -> None:
    for served in ("tcp://127.0.0.1:1", with_key("tcp://127.0.0.1:1", "00" * 32), "x#y"):
        peer = KeyedPeer(bus, principal("worker", "w0"))
        peer.hello("worker", served=served)
        assert peer.dismissal() == "forbidden"
    own = with_key("tcp://127.0.0.1:1", peer.principal.key)
    peer.hello("worker", served=own, bulk="tcp://127.0.0.1:2")
    assert peer.dismissal() == "forbidden"
    peer.hello("worker", served=own, bulk=own)
    assert peer.take("welcome")


def test_client_cannot_speak_as_a_worker_that_it_connected_beside(bus: Bus) -> None:
    peer = joined(bus, "client")
    peer.say(Entry("beat", epoch="c.1", body=pack(Heartbeat(1))))
    assert peer.dismissal() == "forbidden"
    assert len(bus.core.context.clients) == 0


def test_request_under_a_foreign_rid_is_refused(bus: Bus) -> None:
    bus.worker()
    peer = joined(bus, "client")
    for rid in ("bob/1", "annie/1"):
        peer.ask("generate", rid=rid)
        assert peer.refusal() == "bad_request"


@pytest.mark.parametrize("role", ["client", "trainer"])
def test_tokens_of_a_foreign_request_cannot_be_had_by_repair(bus: Bus, role: str) -> None:
    worker = bus.worker()
    peer = joined(bus, role)
    peer.repair("bob/7")
    assert peer.refusal() == "forbidden"
    peer.repair("ann/7")
    assert worker.take("repair")


@pytest.mark.parametrize("role", ["subscriber", "admin"])
def test_who_may_watch_all_streams_may_repair_what_it_missed_of_them(bus: Bus, role: str) -> None:
    worker = bus.worker()
    peer = joined(bus, role)
    peer.repair("bob/7")
    assert worker.take("repair")
    assert not peer.take("refused")


@pytest.mark.parametrize("role", ["subscriber", "client", "admin"])
@pytest.mark.parametrize("route", ["fleet", "store", ""])
def test_a_repair_is_asked_of_one_worker(bus: Bus, role: str, route: str) -> None:
    worker = bus.worker()
    peer = joined(bus, role)
    peer.repair("ann/7", route)
    assert peer.refusal() == "forbidden"
    assert not worker.take("repair")


def test_sessions_of_a_limited_key_are_its_own_only(bus: Bus) -> None:
    bus.worker()
    peer = joined(bus, "client", sessions=["ann-*"])
    peer.ask("generate", session="bob-1")
    assert peer.refusal() == "forbidden"
    peer.ask("open_session", pack(OpenSession("bob-1")), rid="ann/2")
    assert peer.refusal() == "forbidden"
    peer.ask("open_session", pack(OpenSession("ann-1")), rid="ann/3")
    assert not peer.take("refused")


def test_forbidden_entry_does_not_take_its_neighbours_with_it(bus: Bus) -> None:
    peer = joined(bus, "client")
    status = Entry("status", "ann/1", deadline_ms=9000, body=pack(Status()))
    pause = Entry("pause", "ann/2", deadline_ms=9000, route="fleet", body=pack(Pause()))
    peer.say(status, pause, Entry("status", "ann/3", deadline_ms=9000, body=pack(Status())))
    assert {entry.rid for entry in peer.take("finished")} == {"ann/1", "ann/3"}
    assert peer.refusal() == "forbidden"


def test_unknown_kind_is_still_called_unknown(bus: Bus) -> None:
    peer = joined(bus, "client")
    peer.ask("teleport")
    assert peer.refusal() == "unknown_message"


def test_revoked_client_is_dismissed_and_its_work_stopped(bus: Bus) -> None:
    worker = bus.worker()
    peer = joined(bus, "client")
    peer.ask("generate")
    worker.accept(*worker.take("generate"))
    bus.apply(bus.core.handle(Revoked([peer.peer], "forbidden"), bus.now))
    assert peer.dismissal() == "forbidden"
    assert worker.take("fenced")
    assert len(bus.core.context.clients) == 0


def test_revoked_worker_loses_its_lease_at_once(bus: Bus) -> None:
    worker = bus.worker()
    bus.apply(bus.core.handle(Revoked([worker.peer, Peer(b"nobody")], "forbidden"), bus.now))
    assert worker.take("dismissed")
    assert not list(bus.core.context.members)


def test_goodbye_of_any_role_is_heard(bus: Bus) -> None:
    peer = joined(bus, "subscriber")
    peer.say(Entry("goodbye", body=pack(Goodbye())))
    assert len(bus.core.context.clients) == 0


@pytest.mark.parametrize("is_done", [False, True])
def test_what_a_trainer_was_answered_is_told_to_nobody_who_knows_the_rid(*, is_done: bool) -> None:
    bus = Bus()
    worker = bus.worker(abilities=["generate", "get_weights"])
    trainer, eve = joined(bus, "trainer"), joined(bus, "subscriber", "eve")
    body = pack(GetWeights("w", 0, 0))
    rid = trainer.ask("get_weights", body, rid="ann/1", route="worker:w0")
    (share,) = worker.take("get_weights")
    if is_done:
        worker.end(share, body=Done("secret"))
        assert [each.rid for each in trainer.take("finished")] == [rid]
    place = Entry("repair", rid, route="worker:w0", deadline_ms=9000)
    eve.say(msgspec.structs.replace(place, body=pack(Repair("eve/7", (1, 1), 0))))
    assert eve.take("finished") == []
    assert eve.refusal() == "bad_request"
