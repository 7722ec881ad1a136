"""A simulated worker: the shipped core on simulated ports, and its simulated engine host."""

from collections.abc import Callable
from typing import NamedTuple

from rolloutbus.bus.actor.effects import Connect, Publish, Send, Stop
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.weights import CommitUpdate
from rolloutbus.engine_worker.settings import HostSettings, StreamSettings, WorkerSettings
from rolloutbus.engine_worker.worker.core import WorkerCore
from rolloutbus.engine_worker.worker.effects import KillHost, StartHost, ToHost, WorkerEffect
from tests.drills.simulation.memory_ports import MemoryNet
from tests.drills.simulation.peeks import is_busy, is_idle_member, rest_s
from tests.drills.simulation.process import BACK, TICK_S, Process
from tests.drills.simulation.sim_host import SILENT_S, SimHost
from tests.drills.simulation.sim_link import SimLink
from tests.drills.simulation.watch import UpdatePhase, Watch

IDLE_S = 1.0
"""Between two lists of open streams: less often than usual, they are most of what is published."""
START_S = (0.2, 0.5, 2.0, 6.0)
"""An engine takes one of these times to start."""


class Site(NamedTuple):
    """Where a worker's engine runs."""

    step_s: float
    slots: int
    """Requests that run side by side."""
    can_pull: Callable[[str], bool]
    """Whether the store can be reached from the worker of this name."""
    router: str = BACK
    """Address of the router, or of both of a pair."""


class WorkerNode(Process):
    """A worker process and its engine host."""

    def __init__(self, name: str, net: MemoryNet, watch: Watch, boot: int, site: Site) -> None:
        super().__init__(name, net.time)
        self._watch, self._site = watch, site
        self._chance = self.time.chance(f"{name}/{boot}")
        self._link = SimLink(self, net, site.router, self._from_router, self._link_down)
        self._n_leases_lost = 0
        self._deadlines: dict[str, float] = {}
        """When each `generate` must have ended, as it was told."""
        self.n_crashes = 0
        self.host: SimHost | None = None
        self.given_up: set[str] = set()
        """rids of requests that it gave up because its host stood still."""
        stream = f"ipc:///sim/{name}.{boot}"
        self._publisher = net.publisher(stream, name)
        streams = StreamSettings(idle_s=IDLE_S)
        host = HostSettings(silent_s=SILENT_S)
        settings = WorkerSettings(
            name=name,
            router=site.router,
            stream=stream,
            engine="fake",
            streams=streams,
            host=host,
        )
        self.core = WorkerCore(settings, f"{name}{boot:028x}", stream, 1, self._chance)
        self._member = self.core.member
        self._apply(self.core.start(self.time.now))
        self.start_ticking(self._chance.random())

    def kill(self) -> None:
        """As SIGKILL, its engine host with it."""
        self.is_alive = False
        if self.host is not None:
            self.host.is_alive = False
        self._publisher.close()
        self._link.close()

    def kill_host(self) -> None:
        """The engine host is killed from outside."""
        self._host_dies(self.host, was_killed=True)

    def tick(self) -> None:
        """Time passes."""
        now, member = self.time.now, self._member
        has_work = is_busy(self.core)
        if has_work or self.thawed_at == now or not is_idle_member(member, now):
            self._after(self.core.tick(now))
            if self.host is not None and self.host.is_frozen and self.core.needs_host(now):
                self.given_up |= {rid for rid, *_ in member.deliveries.running_list()}
                self._after(self.core.host_stopped(now))
            if self._deadlines:
                self._check_deadlines(now)
        self.tick_s = TICK_S if has_work else max(TICK_S, rest_s(member, now))

    # -- the owner of its engine host -----------------------------------------------------------

    def host_says(self, host: SimHost, entry: Entry) -> None:
        """The host sends something."""
        self.hear(self._from_host, host, entry)

    def engine_failed(self, rid: str) -> None:
        """The engine reports an error instead of this request's tokens."""
        self._watch.requests.engine_failed(rid)

    def engine_struck(self, host: SimHost, rid: str) -> None:
        """The engine dies of this request."""
        self._watch.requests.engine_struck(self, rid)
        self._host_dies(host, was_killed=False)

    def can_pull(self) -> bool:
        """Whether the store can be reached."""
        return self._site.can_pull(self.name)

    def update_reached(self, phase: UpdatePhase) -> None:
        """A weight update has come so far."""
        self._watch.fleet.update_reached(phase, self.name)

    # -- what its core decides ------------------------------------------------------------------

    def _host_dies(self, host: SimHost | None, *, was_killed: bool) -> None:
        if host is not None and host.is_alive:
            host.is_alive = False
            self.n_crashes += 1
            self.hear(self._host_exited, was_killed)

    def _host_exited(self, was_killed: bool) -> None:
        self._after(self.core.host_exited("it died", self.time.now, was_killed=was_killed))

    def _check_deadlines(self, now: float) -> None:
        for rid, deadline_at in list(self._deadlines.items()):
            if self._member.deliveries.running(rid) is None:
                del self._deadlines[rid]
            elif deadline_at < now:
                self._watch.requests.overran(self, rid, now - deadline_at)

    def _after(self, effects: list[WorkerEffect]) -> None:
        """Apply what follows from one event, and the end of the loop tick."""
        if effects:
            self._apply(effects)
        effects = self.core.flush(self.time.now)
        if effects:
            self._apply(effects)
        self._link.flush()
        n_lost = self._member.counters.leases_lost
        if n_lost != self._n_leases_lost:
            self._n_leases_lost = n_lost
            self._watch.fleet.lease_ended(self)

    def _apply(self, effects: list[WorkerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):  # by far the most
                if effect.entry.kind in ENDINGS:
                    self._watch.requests.answered(self, effect.entry)
                self._link.send(effect.entry)
            elif isinstance(effect, Publish):
                self._publisher.publish(effect.topic, effect.entry)
            else:
                self._apply_rare(effect)

    def _apply_rare(self, effect: WorkerEffect) -> None:
        match effect:
            case ToHost(entry):
                if entry.kind == "generate":
                    self._watch.requests.began(self, entry)
                elif entry.kind == "commit_update":
                    self._swap(entry)
                if self.host is not None:
                    self.host.hear(entry)
            case Connect(n_lost):
                self._link.connect(n_lost)
            case StartHost():
                self._start_host()
            case KillHost():
                self.kill_host()
            case Stop():
                self.kill()
            case _:
                pass

    def _from_router(self, entries: list[Entry]) -> None:
        now = self.time.now
        for entry in entries:
            if entry.kind == "generate":
                deadline_at = now + entry.deadline_ms / 1000
                self._deadlines[entry.rid] = max(self._deadlines.get(entry.rid, 0.0), deadline_at)
        effects = self.core.bus(entries, now)
        if effects or entries[0].kind != "lease" or len(entries) > 1:
            self._after(effects)

    def _link_down(self) -> None:
        self._after(self.core.link_down(self.time.now))

    def _swap(self, entry: Entry) -> None:
        body = unpack(entry)
        assert isinstance(body, CommitUpdate)
        self._watch.fleet.swapping(self, body.version)
        self._watch.fleet.update_reached("swap", self.name)

    def _start_host(self) -> None:
        self.host = SimHost(self.time, self._site[:2], self)
        self.host.start(self._chance.choice(START_S))

    def _from_host(self, host: SimHost, entry: Entry) -> None:
        if host.is_alive:
            self._after(self.core.host([entry], self.time.now))
