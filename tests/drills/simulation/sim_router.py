"""A simulated router: the shipped core on simulated ports."""

from functools import partial
from typing import NamedTuple

from rolloutbus.bus.actor.effects import SendAll
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Effect, Handle, LettersKept, Received, Returned, Ticked
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.requests.record import Request
from rolloutbus.router.settings import RouterSettings
from tests.drills.simulation.memory_ports import MemoryHub, MemoryNet
from tests.drills.simulation.process import BACK, FRONT, Process
from tests.drills.simulation.session_oracle import SessionOracle
from tests.drills.simulation.watch import UpdatePhase, Watch

PHASES: dict[str, UpdatePhase] = {
    "prepare_update": "prepare",
    "record_commit": "record",
    "commit_update": "commit",
}
"""Command of a router -> phase of the weight update that begins with it."""
NEVER = float("inf")


class Reign(NamedTuple):
    """What a process of a pair hands to the router that it is while it is active."""

    settings: RouterSettings
    hubs: list[MemoryHub]


class RouterNode(Process):
    """A router process, or what a process of a pair is between its takeover and its standing by."""

    def __init__(
        self, net: MemoryNet, watch: Watch, instance: str, reign: Reign | None = None
    ) -> None:
        """With a `reign` its process brings ticks and batches, and is frozen or killed itself."""
        super().__init__("router", net.time)
        chance = self.time.chance(instance)
        settings = RouterSettings(FRONT, BACK) if reign is None else reign.settings
        self.core = RouterCore(settings, instance, chance)
        self.handle: Handle = self.core.handle
        """What the core does, with whoever listens."""
        self._context = self.core.context
        self.born_at, self.ended_at = self.time.now, NEVER
        self._watch = watch
        self._sessions = SessionOracle(self.core, watch.fleet.session_broken)
        self._deadlines: dict[str, float] = {}
        """When each `generate` must have gone out, as it was told."""
        self._watch_placement()
        self._is_alone = reign is None
        if reign is None:
            self._hubs = [net.hub(endpoint, "router", self.receive) for endpoint in (FRONT, BACK)]
            self.start_ticking(chance.random())
        else:
            self._hubs = reign.hubs

    def end(self) -> None:
        """It serves no more."""
        self.is_alive, self.ended_at = False, self.time.now

    def kill(self, *, is_silent: bool = False) -> None:
        """As SIGKILL; silent: its machine went with it, so that no connection is reset."""
        self.end()
        for hub in self._hubs:
            hub.close(is_silent=is_silent)

    def has_heard_of(self, rid: str) -> bool:
        """Whether it was asked for this request."""
        return rid in self._deadlines

    def tick(self) -> None:
        """Time passes."""
        now = self.time.now
        late = self.core.context.members.expired(now)
        self._apply(self.handle(Ticked(), now))
        for member in late:
            if member.state == "gone":
                self._watch.fleet.expired(self, member)
        if self.core.dead_letters:
            self.handle(LettersKept(), now)
        self._sessions.check()

    def receive(self, peer: Peer, entries: list[Entry]) -> None:
        """A batch has come."""
        now = self.time.now
        if now < self.frozen_until:
            self.hear(self.receive, peer, entries)
            return
        for entry in entries:
            if entry.kind == "generate":
                deadline_at = now + entry.deadline_ms / 1000
                self._deadlines[entry.rid] = max(self._deadlines.get(entry.rid, 0.0), deadline_at)
            elif entry.kind == "open_session":
                self._sessions.heard(entry)
        self._apply(self.handle(Received(peer, entries), now))

    def _apply(self, effects: list[Effect]) -> None:
        if not effects:
            return
        front, back = self._hubs
        for effect in effects:
            if isinstance(effect, SendAll):
                peer, entries = effect.peer, effect.entries
                if not (front.send_all(peer, entries) or back.send_all(peer, entries)):
                    returned = partial(self.hear, self._returned, peer, entries)
                    self.time.later(0.0, returned)
                if len(entries) > 1 or entries[0].kind != "lease":  # by far the most
                    self._tell(peer, entries)
        if self._context.superseded and self.is_alive and self._is_alone:
            self.kill()
            self._watch.fleet.stepped_down(self)

    def _returned(self, peer: Peer, entries: list[Entry]) -> None:
        self._apply(self.handle(Returned(peer, entries), self.time.now))

    def _tell(self, peer: Peer, entries: list[Entry]) -> None:
        """Say what others must know of what it sends."""
        for entry in entries:
            if entry.kind == "session_moved":
                self._sessions.told(peer, entry)
            elif entry.kind in PHASES:
                self._watch.fleet.update_reached(PHASES[entry.kind], entry.rid.rpartition("@")[2])

    def _watch_placement(self) -> None:
        """Tell of each placement at the moment of the decision."""
        load = self.core.table.load

        def watched(request: Request, worker: MemberRecord) -> None:
            if request.state == "sent":  # it was not found running there
                late_s = self.time.now - self._deadlines.get(request.rid, NEVER)
                self._watch.requests.placed(self, worker, request.rid, late_s)
            load(request, worker)

        self.core.table.load = watched
