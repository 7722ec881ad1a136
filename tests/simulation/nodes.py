"""Simulated processes: each is the shipped core of one role with simulated ports and timers."""

from collections.abc import Callable

from bus.effects import Connect, Publish, Send, Stop
from bus.entry import Entry
from bus.ids import Peer, RequestId
from bus.member import MemberCore, MemberIdentity
from bus.member_effects import Execute, MemberEffect
from bus.memory_ports import MemoryHub, MemoryLink, MemoryNet
from bus.messages.endings import Done
from bus.messages.membership import StoreFacts
from bus.settings import LeaseSettings
from bus.testing import VirtualTime
from engine_worker.core import WorkerCore
from engine_worker.effects import KillHost, StartHost, ToHost, WorkerEffect
from engine_worker.settings import WorkerSettings
from router.core import RouterCore
from router.outgoing import Effect as RouterEffect
from router.settings import RouterSettings
from tests.simulation.sim_host import SimHost

FRONT, BACK = "ipc:///sim/front", "ipc:///sim/back"
TICK_S = 0.25


class Node:
    """A process: alive, frozen or dead; work that arrives while it is frozen waits."""

    def __init__(self, name: str, time: VirtualTime) -> None:
        self.name = name
        self.time = time
        self.is_alive = True
        self._frozen_until = 0.0
        self._backlog: list[Callable[[], None]] = []

    def freeze(self, for_s: float) -> None:
        """As SIGSTOP, and SIGCONT after `for_s`."""
        self._frozen_until = max(self._frozen_until, self.time.now + for_s)
        self.time.later(for_s, self._thaw)

    def guarded(self, action: Callable[[], None]) -> None:
        """Do it now, when thawed, or never if the process is dead."""
        if not self.is_alive:
            return
        if self.time.now < self._frozen_until:
            self._backlog.append(action)
        else:
            action()

    def ticking(self, tick: Callable[[], None]) -> None:
        """Tick for as long as the process lives; a frozen one misses its ticks."""

        def once() -> bool:
            if self.is_alive and self.time.now >= self._frozen_until:
                tick()
            return self.is_alive

        self.time.every(TICK_S, once)

    def _thaw(self) -> None:
        if self.time.now + 1e-9 < self._frozen_until:
            return
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.guarded(action)


class RouterNode(Node):
    """A router process."""

    def __init__(self, net: MemoryNet, time: VirtualTime, instance: str) -> None:
        super().__init__("router", time)
        self.core = RouterCore(RouterSettings(FRONT, BACK), instance, time.chance(instance))
        self._hubs: list[MemoryHub] = [
            net.hub(endpoint, "router", self._receive) for endpoint in (FRONT, BACK)
        ]
        self.ticking(lambda: self._apply(self.core.tick(self.time.now)))

    def kill(self) -> None:
        """As SIGKILL."""
        self.is_alive = False
        for hub in self._hubs:
            hub.close()

    def _receive(self, peer: Peer, entries: list[Entry]) -> None:
        self.guarded(lambda: self._apply(self.core.receive(peer, entries, self.time.now)))

    def _apply(self, effects: list[RouterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                for hub in self._hubs:
                    hub.send(effect.peer, effect.entry)


class WorkerNode(Node):
    """A worker process and its engine host."""

    def __init__(
        self, name: str, net: MemoryNet, time: VirtualTime, boot: int, step_s: float
    ) -> None:
        super().__init__(name, time)
        self._net = net
        self._step_s = step_s
        self._chance = time.chance(f"{name}/{boot}")
        self._link: MemoryLink | None = None
        self._is_flushing = False
        self.hosts: list[SimHost] = []
        stream = f"ipc:///sim/{name}.{boot}"
        self._publisher = net.publisher(stream, name)
        settings = WorkerSettings(name=name, router=BACK, stream=stream, engine="fake")
        self.core = WorkerCore(settings, f"{name}{boot:028x}", stream, 1, self._chance)
        self._apply(self.core.start(time.now))
        self.ticking(lambda: self._apply(self.core.tick(self.time.now)))

    @property
    def executions(self) -> list[tuple[str, tuple[int, int]]]:
        """(rid, attempt) of everything its engines were given."""
        return [key for host in self.hosts for key in host.executions]

    def kill(self) -> None:
        """As SIGKILL, its engine host with it."""
        self.is_alive = False
        self.kill_host(tell=False)
        self._publisher.close()
        if self._link is not None:
            self._link.close()

    def kill_host(self, *, tell: bool = True) -> None:
        """The engine host crashes."""
        for host in self.hosts:
            if host.is_alive:
                host.is_alive = False
                if tell:
                    self.guarded(
                        lambda: self._apply(self.core.host_exited("exit 139", self._now()))
                    )

    def _now(self) -> float:
        return self.time.now

    def _apply(self, effects: list[WorkerEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, entry):
                    if self._link is not None:
                        self._link.send(entry)
                case Publish(topic, entry):
                    self._publisher.publish(topic, entry)
                case ToHost(entry):
                    if self.hosts:
                        self.hosts[-1].hear(entry)
                case Connect():
                    self._connect()
                case StartHost():
                    self._start_host()
                case KillHost():
                    self.kill_host()
                case Stop():
                    self.kill()
        if not self._is_flushing and self.is_alive:
            self._is_flushing = True
            self.time.later(0.0, lambda: self.guarded(self._flush))

    def _flush(self) -> None:
        effects = self.core.flush(self._now())
        self._is_flushing = True
        self._apply(effects)
        self._is_flushing = False

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()

        def receive(entries: list[Entry]) -> None:
            self.guarded(lambda: self._apply(self.core.bus(entries, self._now())))

        def down() -> None:
            self.guarded(lambda: self._apply(self.core.link_down(self._now())))

        self._link = self._net.link(BACK, self.name, receive, down)

    def _start_host(self) -> None:
        host = SimHost(self.time, self._step_s, lambda entries: self._hear(host, entries))
        self.hosts.append(host)
        host.start(self._chance.uniform(0.2, 2.0))

    def _hear(self, host: SimHost, entries: list[Entry]) -> None:
        def handle() -> None:
            if host.is_alive:
                self._apply(self.core.host(entries, self._now()))

        self.guarded(handle)


class StoreNode(Node):
    """A weight store that only keeps its promises: membership and the record of commits."""

    def __init__(self, net: MemoryNet, time: VirtualTime) -> None:
        super().__init__("store", time)
        self._net = net
        self._link: MemoryLink | None = None
        identity = MemberIdentity("store", "store", "5" * 32)
        self._member = MemberCore(identity, LeaseSettings(), time.chance("store"))
        self._committed: dict[str, int] = {}
        facts = StoreFacts("ipc:///sim/bulk", self._committed)
        self._apply(self._member.online(facts, time.now))
        self.ticking(lambda: self._apply(self._member.tick(self.time.now)))

    def _apply(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, entry):
                    if self._link is not None:
                        self._link.send(entry)
                case Connect():
                    self._connect()
                case Execute(entry):
                    key = (RequestId(entry.rid), entry.attempt)
                    self._apply(self._member.ended("finished", key, Done(), self.time.now))
                case _:
                    pass

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._net.link(
            BACK,
            self.name,
            lambda entries: self._apply(self._member.receive(entries, self.time.now)),
            lambda: self._apply(self._member.link_down(self.time.now)),
        )
