"""A router core with peers that a test plays by hand.

Every entry crosses the codec. Peers whose `is_alive` is set heartbeat by themselves when time
passes.
"""

from random import Random
from typing import Any

import msgspec

from rolloutbus.bus.actor.effects import ForgetPeer
from rolloutbus.bus.wire.codec import decode_batch, encode_batch, pack, unpack, unpack_fleet
from rolloutbus.bus.wire.entry import NO_ATTEMPT, NO_BODY, Attempt, Entry, Peer, Placement
from rolloutbus.bus.wire.messages.control import FleetOutcome
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, Problem
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Heartbeat,
    Hello,
    Intent,
    StoreFacts,
    WorkerFacts,
)
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Effect, Received, Ticked
from rolloutbus.router.settings import RouterSettings

TICK_S = 0.25
INSTANCE = "router-a"


class Bus:
    """One router core, its clock, and its peers."""

    def __init__(
        self,
        *,
        recovered: bool = True,
        queue_limit: int = 100,
        seed: int = 1,
        **settings_: Any,  # noqa: ANN401 - fields of RouterSettings
    ) -> None:
        settings = RouterSettings(
            "ipc:///r/front", "ipc:///r/back", queue_limit=queue_limit, **settings_
        )
        self.core = RouterCore(settings, INSTANCE, Random(seed))
        self.now = 1000.0
        self.peers: dict[Peer, SimPeer] = {}
        self.reachable: set[Peer] = set()
        """Connections that the router's port would still send to."""
        self.n_peers = 0
        self.apply(self.core.handle(Ticked(), self.now))
        if recovered:
            self.advance(4.0)

    def deliver(self, peer: Peer, entries: list[Entry]) -> None:
        """A batch arrives at the router, which can answer from now on."""
        self.reachable.add(peer)
        self.apply(self.core.handle(Received(peer, decode_batch(encode_batch(entries))), self.now))

    def apply(self, effects: list[Effect]) -> None:
        """Hand what the router sent to whom it was sent."""
        for effect in effects:
            if isinstance(effect, ForgetPeer):
                self.reachable.discard(effect.peer)
            elif effect.peer in self.reachable:
                self.peers[effect.peer].heard += decode_batch(encode_batch(effect.entries))

    def advance(self, seconds: float) -> None:
        """Time passes in ticks; living peers heartbeat twice a second."""
        for step in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for peer in list(self.peers.values()):
                if peer.is_alive and step % 2 == 0:
                    peer.heartbeat()
            self.apply(self.core.handle(Ticked(), self.now))

    def freeze(self, seconds: float) -> None:
        """The router process stands still; everybody else goes on, unheard."""
        self.now += seconds

    @property
    def counters(self) -> dict[str, int]:
        """What the router counted."""
        return self.core.context.counters

    def client(self, name: str = "trainer") -> "SimClient":
        """A client that has said hello."""
        return SimClient(self, name)

    def worker(
        self,
        name: str = "w0",
        *,
        slots: int = 4,
        version: int = 0,
        intent: Intent | None = None,
        **facts: Any,  # noqa: ANN401 - fields of WorkerFacts
    ) -> "SimWorker":
        """A worker that has said hello and beaten once.

        At a recovering router it is one that knew the router before, and was told nothing.
        """
        if intent is None and self.core.context.is_recovering:
            intent = Intent(fleet=INSTANCE)
        return SimWorker(self, name, slots, version, facts, intent)

    def store(
        self,
        committed: dict[str, int] | None = None,
        host: str = "",
        intent: Intent | None = None,
        **facts: Any,  # noqa: ANN401 - fields of StoreFacts
    ) -> "SimStore":
        """A weight store that has said hello and beaten once."""
        bulk = facts.pop("bulk", "tcp://127.0.0.1:9")
        return SimStore(self, StoreFacts(bulk, committed or {}, host, **facts), intent)


class SimPeer:
    """One connection."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.name = name
        self.is_alive = True
        self.heard: list[Entry] = []
        self.connect()

    def connect(self) -> None:
        """A fresh connection; the router does not know it yet."""
        self.bus.n_peers += 1
        self.peer = Peer(self.bus.n_peers.to_bytes(16, "big"))
        self.bus.peers[self.peer] = self

    def say(self, *entries: Entry) -> None:
        """Send one batch."""
        self.bus.deliver(self.peer, list(entries))

    def take(self, *kinds: str) -> list[Entry]:
        """What was heard of these kinds, once."""
        taken = [entry for entry in self.heard if entry.kind in kinds]
        self.heard = [entry for entry in self.heard if entry.kind not in kinds]
        return taken

    def heard_one(self, kind: str) -> Entry:
        """The only message of this kind, however often it was sent."""
        first, *again = self.take(kind)
        assert {(each.rid, each.attempt) for each in again} <= {(first.rid, first.attempt)}
        return first

    def take_body(self, kind: str) -> Any:  # noqa: ANN401 - the struct that this kind has
        """The body of the only entry of this kind."""
        (entry,) = self.take(kind)
        return unpack(entry)

    def heartbeat(self) -> None:
        """Say that it lives."""
        raise NotImplementedError


class SimClient(SimPeer):
    """A client."""

    def __init__(self, bus: Bus, name: str) -> None:
        super().__init__(bus, name)
        self._n = 0
        self._n_heartbeats = 0
        self.hello()

    def hello(self, boot: str = "c" * 32) -> None:
        """Introduce itself."""
        self.say(Entry("hello", body=pack(Hello("client", self.name, boot))))

    def heartbeat(self) -> None:
        self._n_heartbeats += 1
        self.say(Entry("client_beat", body=pack(ClientHeartbeat(self._n_heartbeats))))

    def ask(
        self,
        kind: str,
        body: msgspec.Struct | None = None,
        route: str = "",
        *,
        deadline_s: float = 10,
        rid: str = "",
    ) -> str:
        """Any command, under a rid of its own unless given; returns its rid."""
        rid = rid or self.next_rid()
        raw = pack(body) if body is not None else NO_BODY
        self.say(Entry(kind, rid, NO_ATTEMPT, "", route, int(deadline_s * 1000), None, raw))
        return rid

    def generate(self, versions: str = "any", deadline_s: float = 10, **place: Any) -> str:  # noqa: ANN401 - fields of Placement
        """Submit one request; returns its rid."""
        rid = self.next_rid()
        self.submit(rid, deadline_s, versions=versions, **place)
        return rid

    def submit(self, rid: str, deadline_s: float = 10, **place: Any) -> None:  # noqa: ANN401 - fields of Placement
        """Submit one request under a rid, again maybe."""
        self.submit_all([rid], deadline_s, **place)

    def submit_all(self, rids: list[str], deadline_s: float = 10, **place: Any) -> None:  # noqa: ANN401 - fields of Placement
        """Submit like requests in one frame."""
        where = msgspec.structs.replace(Placement("default", cost=10), **place)
        left_ms = int(deadline_s * 1000)
        self.say(*[Entry("generate", rid, deadline_ms=left_ms, place=where) for rid in rids])

    def next_rid(self) -> str:
        """A rid never used before."""
        self._n += 1
        return f"{self.name}/{self._n}"

    def acknowledge(self, ending: Entry, *over: str) -> None:
        """The ending arrived, and these requests are over."""
        body = pack(Ack([(ending.rid, ending.attempt)], list(over)))
        self.say(Entry("ack", route=f"worker:{ending.route}", body=body))

    def say_over(self, *rids: str) -> None:
        """These requests have ended for their caller."""
        self.say(Entry("ack", body=pack(Ack([], list(rids)))))

    def ending(self) -> tuple[str, str]:
        """(kind, problem code or nothing) of the only ending heard."""
        (entry,) = self.take("finished", "failed", "cancelled", "expired", "refused")
        if entry.kind in {"finished", "cancelled"}:
            return entry.kind, ""
        body = unpack(entry)
        assert isinstance(body, Problem)
        return entry.kind, body.code

    def problem(self) -> Problem:
        """The body of the only ending heard, which has one."""
        (entry,) = self.take("failed", "expired", "refused")
        body = unpack(entry)
        assert isinstance(body, Problem)
        return body

    def outcome(self) -> FleetOutcome:
        """The result of the only fleet command that finished."""
        (entry,) = self.take("finished")
        return unpack_fleet(entry)


class SimMember(SimPeer):
    """A worker or a store."""

    def __init__(self, bus: Bus, name: str) -> None:
        super().__init__(bus, name)
        self.boot = f"{bus.n_peers:032x}"
        self.lease_no = 1
        self.seq = 0
        self.version = 0
        self.state = "ready"
        self.running: list[tuple[str, Attempt, str]] = []
        self.outbox: list[tuple[str, Attempt, str]] = []
        self.detached: list[tuple[str, str]] = []
        self.over: list[str] = []
        self.suspects: list[tuple[str, int, int]] = []

    @property
    def epoch(self) -> str:
        """Its present lease."""
        return f"{self.boot}.{self.lease_no}"

    def heartbeat(self) -> None:
        self.seq += 1
        heartbeat = Heartbeat(
            self.seq,
            self.version,
            self.state,
            running=self.running,
            outbox=self.outbox,
            detached=self.detached,
            over=self.over,
            suspects=self.suspects,
        )
        self.say(Entry("beat", epoch=self.epoch, body=pack(heartbeat)))

    def accept(self, *commands: Entry) -> None:
        """Begin these."""
        self.running += [(each.rid, each.attempt, each.route) for each in commands]
        body = pack(Accepted([(each.rid, each.attempt) for each in commands]))
        self.say(Entry("accepted", epoch=self.epoch, body=body))

    def end(
        self, command: Entry, kind: str = "finished", body: msgspec.Struct | None = None
    ) -> None:
        """End one."""
        self.running = [each for each in self.running if each[0] != command.rid]
        raw = pack(body) if body is not None else NO_BODY
        self.say(Entry(kind, command.rid, command.attempt, self.epoch, command.route, body=raw))


class SimWorker(SimMember):
    """A worker."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        slots: int,
        version: int,
        facts: dict[str, Any],
        intent: Intent | None,
    ) -> None:
        super().__init__(bus, name)
        self.slots = slots
        self.intent = intent
        self.facts = facts
        self.version = version
        self.hello()
        self.heartbeat()

    def hello(self, router_epoch: int = 0, router_instance: str = "") -> None:
        """Introduce itself, or come back."""
        facts = dict(self.facts)
        abilities = facts.pop("abilities", ["generate"])
        policy = facts.pop("policy", "default")
        offered = (policy, "ipc:///s", self.slots, 4096, 100, "fake", abilities)
        facts = WorkerFacts(*offered, **facts)
        hello = Hello(
            "worker",
            self.name,
            self.boot,
            self.epoch,
            router_epoch,
            router_instance,
            worker=facts,
            intent=self.intent,
        )
        self.say(Entry("hello", body=pack(hello)))


class SimStore(SimMember):
    """A weight store."""

    def __init__(self, bus: Bus, facts: StoreFacts, intent: Intent | None) -> None:
        super().__init__(bus, "store")
        hello = Hello("store", "store", self.boot, self.epoch, store=facts, intent=intent)
        self.say(Entry("hello", body=pack(hello)))
        self.heartbeat()
