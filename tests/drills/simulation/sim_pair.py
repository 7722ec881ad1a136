"""A simulated process of a pair of routers: the shipped `Pair` on simulated ports, and its router.

What `rolloutbus.router.actor` does with the two is done here: it takes over, stands by, and turns
everybody away meanwhile.
"""

from collections.abc import Callable
from typing import Protocol

from rolloutbus.bus.actor.effects import Connect, SendAll
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.membership import Hello
from rolloutbus.router.actor import turned_away
from rolloutbus.router.events import Effect
from rolloutbus.router.pair import Effect as PairEffect
from rolloutbus.router.pair import Pair, Rank
from rolloutbus.router.settings import PairSettings, RouterSettings
from tests.drills.simulation.memory_ports import MemoryNet
from tests.drills.simulation.process import BACK, BACK_2, FRONT, FRONT_2, ROUTERS, Process
from tests.drills.simulation.sim_link import SimLink
from tests.drills.simulation.sim_router import Reign, RouterNode

ADDRESSES: dict[str, tuple[str, str]] = dict(
    zip(ROUTERS, ((FRONT, BACK), (FRONT_2, BACK_2)), strict=True)
)
"""Name of a process -> its endpoints for clients and for members."""
LEASES = LeaseSettings()
NEVER = float("-inf")


class PairWatch(Protocol):
    """Who looks on while routers take over and stand by."""

    def took_over(self, process: "PairNode") -> None:
        """A process of the pair is active from now on."""
        ...

    def stood_down(self, process: "PairNode", *, was_rejected: bool) -> None:
        """A process of the pair was active, and stands by from now on.

        `was_rejected`: a member told it that it obeys another one.
        """
        ...


class PairNode(Process):
    """One of the two router processes."""

    def __init__(
        self,
        name: str,
        net: MemoryNet,
        watch: PairWatch,
        boot: int,
        begin: Callable[[Reign], RouterNode],
    ) -> None:
        """`begin` makes the router that it is whenever it becomes active."""
        super().__init__(name, net.time)
        self._watch, self._begin = watch, begin
        self.other = next(each for each in ROUTERS if each != name)
        """Name of the other process."""
        chance = self.time.chance(f"{name}/{boot}")
        partner, _ = ADDRESSES[self.other]
        settings = PairSettings(partner, is_first=name == ROUTERS[0])
        self.pair = Pair(settings, LEASES, f"{chance.getrandbits(128):032x}", chance)
        self.serving: RouterNode | None = None
        self.born_at = self._ticked_at = self.time.now
        self.woke_at = NEVER
        """When it found that it had stood still."""
        self.asked_at = self.heard_at = NEVER
        """When a member asked it for a router while it stood by; when the other one said
        something."""
        self._hubs = [net.hub(endpoint, name, self._receive) for endpoint in ADDRESSES[name]]
        self._link = SimLink(self, net, partner, self._from_partner, self._partner_down)
        self._apply_pair(self.pair.start(self.time.now))
        self.start_ticking(chance.random())

    def kill(self, *, is_silent: bool = False) -> None:
        """As SIGKILL; silent: its machine went with it, so that no connection is reset."""
        self.is_alive = False
        if self.serving is not None:
            self.serving.end()
        for hub in self._hubs:
            hub.close(is_silent=is_silent)
        self._link.close()

    def tick(self) -> None:
        """Time passes."""
        if self.time.now - self._ticked_at > LEASES.late_tick_s:
            self.woke_at = self.time.now
        self._ticked_at = self.time.now
        self._apply_pair(self.pair.tick(self.time.now, self._rank()))
        serving, is_active = self.serving, self.pair.state == "active"
        if serving is not None and is_active and serving.core.context.superseded:
            self.pair.rejected(serving.core.context.superseded, self._rank())
            is_active = self.pair.state == "active"
        if serving is None and is_active:
            self._take_over()
        elif serving is not None and not is_active:
            self._stand_down(serving)
        if self.serving is not None:
            self.serving.tick()

    def _rank(self) -> Rank:
        if self.serving is None:
            return Rank(has_workers=False, epoch=0)
        context = self.serving.core.context
        return Rank(bool(context.members.workers()), context.router_epoch)

    def _take_over(self) -> None:
        settings = RouterSettings(*ADDRESSES[self.name], epoch=self.pair.epoch)
        self._watch.took_over(self)
        self.serving = self._begin(Reign(settings, self._hubs))

    def _stand_down(self, serving: RouterNode) -> None:
        serving.end()
        self._watch.stood_down(self, was_rejected=bool(serving.core.context.superseded))
        self.serving = None
        context = serving.core.context
        for each in [*context.members, *context.clients]:
            self._apply(turned_away(each.peer))

    def _receive(self, peer: Peer, entries: list[Entry]) -> None:
        now = self.time.now
        if now < self.frozen_until:
            self.hear(self._receive, peer, entries)
            return
        if self.serving is not None:
            self.serving.receive(peer, entries)
            return
        if entries[0].kind == "hello":
            hello = unpack_as(Hello, entries[0])
            self.pair.turned_away(hello, now)
            if hello.role in {"worker", "store"}:
                self.asked_at = now
        self._apply(turned_away(peer))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendAll):
                for hub in self._hubs:
                    hub.send_all(effect.peer, effect.entries)

    def _apply_pair(self, effects: list[PairEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Connect):
                self._link.connect(effect.n_lost)
            else:
                self._link.send(effect.entry)
        self._link.flush()

    def _from_partner(self, entries: list[Entry]) -> None:
        self.heard_at = self.time.now
        self.pair.receive(entries, self.time.now)

    def _partner_down(self) -> None:
        self.pair.link_down(self.time.now)
