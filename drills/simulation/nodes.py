"""Simulated routers, workers and stores: the shipped core of each role on simulated ports."""

from functools import partial
from typing import Protocol

from bus.codec import unpack
from bus.effects import Connect, Publish, Send, SendAll, Stop
from bus.entry import Entry
from bus.ids import Peer
from bus.member import MemberCore, MemberIdentity
from bus.member_effects import Execute, MemberEffect
from bus.memory_ports import MemoryLink, MemoryNet
from bus.messages import ENDINGS
from bus.messages.endings import Done
from bus.messages.membership import StoreFacts
from bus.messages.weights import RecordCommit
from bus.settings import LeaseSettings
from drills.simulation.peeks import is_idle_member, n_running
from drills.simulation.process import BACK, FRONT, Process
from drills.simulation.sim_host import SimHost
from engine_worker.controller import key_of
from engine_worker.core import WorkerCore
from engine_worker.effects import KillHost, StartHost, ToHost, WorkerEffect
from engine_worker.settings import StreamSettings, WorkerSettings
from router.core import RouterCore
from router.members import MemberRecord
from router.outgoing import Effect as RouterEffect
from router.settings import RouterSettings

IDLE_S = 0.5
"""Between two lists of open streams: less often than usual, they are most of what is published."""


class Watch(Protocol):
    """Who looks on while it happens."""

    def began(self, worker: "WorkerNode", entry: Entry) -> None:
        """A worker gave a `generate` to its engine."""
        ...

    def answered(self, worker: "WorkerNode", entry: Entry) -> None:
        """A worker sends an ending."""
        ...

    def lease_ended(self, worker: "WorkerNode") -> None:
        """A worker gave its lease up."""
        ...

    def expired(self, router: "RouterNode", member: MemberRecord) -> None:
        """A router took a lease away because it ran out."""
        ...


class RouterNode(Process):
    """A router process."""

    def __init__(self, net: MemoryNet, watch: Watch, instance: str) -> None:
        super().__init__("router", net.time)
        chance = self.time.chance(instance)
        self.core = RouterCore(RouterSettings(FRONT, BACK), instance, chance)
        self.born_at = self.time.now
        self._watch = watch
        self._hubs = [net.hub(endpoint, "router", self._receive) for endpoint in (FRONT, BACK)]
        self.start_ticking(chance.random())

    def kill(self, *, is_silent: bool = False) -> None:
        """As SIGKILL; silent: its machine went with it, so that no connection is reset."""
        self.is_alive = False
        for hub in self._hubs:
            hub.close(is_silent=is_silent)

    def tick(self) -> None:
        """Time passes."""
        now = self.time.now
        late = [member for member in self.core.context.members if member.expires_at <= now]
        self._apply(self.core.tick(now))
        for member in late:
            if member.state == "gone":
                self._watch.expired(self, member)

    def _receive(self, peer: Peer, entries: list[Entry]) -> None:
        self.hear(self._handle, peer, entries)

    def _handle(self, peer: Peer, entries: list[Entry]) -> None:
        self._apply(self.core.receive(peer, entries, self.time.now))

    def _apply(self, effects: list[RouterEffect]) -> None:
        front, back = self._hubs
        for effect in effects:
            if isinstance(effect, SendAll):
                hub = front if front.has(effect.peer) else back
                for entry in effect.entries:
                    hub.send(effect.peer, entry)
        front.flush()
        back.flush()


class WorkerNode(Process):
    """A worker process and its engine host."""

    def __init__(
        self, name: str, net: MemoryNet, watch: Watch, boot: int, pace: tuple[float, int]
    ) -> None:
        super().__init__(name, net.time)
        self._net, self._watch, self._pace = net, watch, pace
        self._chance = self.time.chance(f"{name}/{boot}")
        self._link: MemoryLink | None = None
        self._n_links = 0
        self._n_leases_lost = 0
        self.n_crashes = 0
        self.host: SimHost | None = None
        stream = f"ipc:///sim/{name}.{boot}"
        self._publisher = net.publisher(stream, name)
        streams = StreamSettings(idle_s=IDLE_S)
        settings = WorkerSettings(
            name=name, router=BACK, stream=stream, engine="fake", streams=streams
        )
        self.core = WorkerCore(settings, f"{name}{boot:028x}", stream, 1, self._chance)
        self._apply(self.core.start(self.time.now))
        self.start_ticking(self._chance.random())

    def kill(self) -> None:
        """As SIGKILL, its engine host with it."""
        self.is_alive = False
        if self.host is not None:
            self.host.is_alive = False
        self._publisher.close()
        if self._link is not None:
            self._link.close()

    def crash_host(self, host: SimHost | None = None) -> None:
        """The engine host (this one, if it still runs) dies."""
        host = host or self.host
        if host is not None and host.is_alive:
            host.is_alive = False
            self.n_crashes += 1
            self.hear(self._host_exited)

    def tick(self) -> None:
        """Time passes."""
        now = self.time.now
        is_idle = not n_running(self.core) and is_idle_member(self.core.member, now)
        if not is_idle or self.thawed_at == now:
            self._after(self.core.tick(now))

    def _host_exited(self) -> None:
        self._after(self.core.host_exited("exit 139", self.time.now))

    def _after(self, effects: list[WorkerEffect]) -> None:
        """Apply what follows from one event, and the end of the loop tick."""
        self._apply([*effects, *self.core.flush(self.time.now)])
        if self._link is not None:
            self._link.flush()
        n_lost = self.core.member.counters.leases_lost
        if n_lost != self._n_leases_lost:
            self._n_leases_lost = n_lost
            self._watch.lease_ended(self)

    def _apply(self, effects: list[WorkerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):  # by far the most
                if effect.entry.kind in ENDINGS:
                    self._watch.answered(self, effect.entry)
                if self._link is not None:
                    self._link.send(effect.entry)
            elif isinstance(effect, Publish):
                self._publisher.publish(effect.topic, effect.entry)
            else:
                self._apply_rare(effect)

    def _apply_rare(self, effect: WorkerEffect) -> None:
        match effect:
            case ToHost(entry):
                if entry.kind == "generate":
                    self._watch.began(self, entry)
                if self.host is not None:
                    self.host.hear(entry)
            case Connect():
                self._connect()
            case StartHost():
                self._start_host()
            case KillHost():
                self.crash_host()
            case Stop():
                self.kill()
            case _:
                pass

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._n_links += 1
        self._link = self._net.link(
            BACK,
            self.name,
            partial(self.hear, self._from_router, self._n_links),
            partial(self.hear, self._link_down, self._n_links),
        )

    def _from_router(self, n_link: int, entries: list[Entry]) -> None:
        if n_link != self._n_links:
            return  # a closed socket is never read again
        effects = self.core.bus(entries, self.time.now)
        if effects or entries[0].kind != "lease" or len(entries) > 1:
            self._after(effects)

    def _link_down(self, n_link: int) -> None:
        if n_link == self._n_links:
            self._after(self.core.link_down(self.time.now))

    def _start_host(self) -> None:
        self.host = SimHost(self.time, self._pace, self._host_says, self.crash_host)
        self.host.start(self._chance.choice([0.2, 0.5, 2.0, 6.0]))

    def _host_says(self, host: SimHost, entry: Entry) -> None:
        self.hear(self._from_host, host, entry)

    def _from_host(self, host: SimHost, entry: Entry) -> None:
        if host.is_alive:
            self._after(self.core.host([entry], self.time.now))


class StoreNode(Process):
    """A weight store that only keeps its promises: membership and the record of commits."""

    def __init__(self, net: MemoryNet, boot: int, committed: dict[str, int]) -> None:
        super().__init__("store", net.time)
        self._net = net
        self._link: MemoryLink | None = None
        self._n_links = 0
        self._committed = committed
        chance = self.time.chance(f"store/{boot}")
        identity = MemberIdentity("store", "store", f"5{boot:031x}")
        self.member = MemberCore(identity, LeaseSettings(), chance)
        facts = StoreFacts("ipc:///sim/bulk", committed)
        self._apply(self.member.online(facts, self.time.now))
        self.start_ticking(chance.random())

    def kill(self) -> None:
        """As SIGKILL; the record stays."""
        self.is_alive = False
        if self._link is not None:
            self._link.close()

    def tick(self) -> None:
        """Time passes."""
        if not is_idle_member(self.member, self.time.now) or self.thawed_at == self.time.now:
            self._apply(self.member.tick(self.time.now))

    def _apply(self, effects: list[MemberEffect]) -> None:
        now = self.time.now
        executed = self._executed(effects, now) if effects else effects
        for effect in [*effects, *executed, *self.member.flush(now)]:
            match effect:
                case Send(_, entry):
                    if self._link is not None:
                        self._link.send(entry)
                case Connect():
                    self._connect()
                case Stop():
                    self.kill()
                case _:
                    pass
        if self._link is not None:
            self._link.flush()

    def _executed(self, effects: list[MemberEffect], now: float) -> list[MemberEffect]:
        """Every command is done at once; the only one with a memory is `record_commit`."""
        found: list[MemberEffect] = []
        for effect in effects:
            if isinstance(effect, Execute):
                entry = effect.entry
                self._record(entry)
                found += self.member.ended("finished", key_of(entry), Done(), now)
        return found

    def _record(self, entry: Entry) -> None:
        body = unpack(entry)
        if isinstance(body, RecordCommit):
            known = self._committed.get(body.policy, 0)
            self._committed[body.policy] = max(known, body.version)

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._n_links += 1
        self._link = self._net.link(
            BACK,
            self.name,
            partial(self.hear, self._from_router, self._n_links),
            partial(self.hear, self._link_down, self._n_links),
        )

    def _from_router(self, n_link: int, entries: list[Entry]) -> None:
        if n_link == self._n_links:
            self._apply(self.member.receive(entries, self.time.now))

    def _link_down(self, n_link: int) -> None:
        if n_link == self._n_links:
            self._apply(self.member.link_down(self.time.now))
