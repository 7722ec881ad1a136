"""What must always be true of a pair of routers: one serves, and takes over for a reason."""

from typing import TYPE_CHECKING

from rolloutbus.router.pair import ASKED_S
from tests.drills.simulation.faults import ROUTER_AFTERMATH_S
from tests.drills.simulation.process import TICK_S
from tests.drills.simulation.routers import RouterPair
from tests.drills.simulation.sim_pair import LEASES, PairNode

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

UNDECIDED_S = 6.0
"""Two routers that hear each other agree after this on which of them is active: silence, a
connection after the longest wait, a heartbeat."""


class PairOracles:
    """Looks after the two routers; without a pair there is nothing to see."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._undecided_s = 0.0
        """For how long the two have heard each other, and not one of them is active."""
        self._unsettled: list[float] = []
        """Moments of `passed` at which not one router was active, or one that recovers."""

    def took_over(self, process: PairNode) -> None:
        """A process of the pair is active from now on: did it have to be?"""
        world, pair = self._world, self._pair()
        world.oracles.seen["takeovers"] += 1
        world.note(f"{process.name} is active from now on")
        world.health.touch("router", ROUTER_AFTERMATH_S)
        other = pair.processes.get(process.other)
        if other is None or not other.is_alive or other.serving is None:
            return
        text = self._needless(process)
        if text:
            world.oracles.broken("one_router", process.name, f"takes over {text}")

    def stood_down(self, process: PairNode, *, was_rejected: bool) -> None:
        """A process of the pair was active, and stands by: is the other one active?

        Members that obey a router which died reject the other one; they cannot know.
        """
        world, pair = self._world, self._pair()
        world.oracles.seen["routers_stood_down"] += 1
        world.note(f"{process.name} stands by from now on: {process.pair.news}")
        world.health.touch("router", ROUTER_AFTERMATH_S)
        latest = max((each.ended_at for each in pair.all if each is not process.serving), default=0)
        now = world.time.now
        is_late = latest < now - LEASES.silence_s and process.woke_at < now - LEASES.silence_s
        if is_late and not was_rejected and not world.is_unreliable:
            world.oracles.broken("one_router", process.name, "stands by, and nobody was active")

    def passed(self, seconds: float) -> None:
        """So much time has passed."""
        routers = self._world.routers
        if not isinstance(routers, RouterPair):
            return
        n_active = len(routers.running)
        if n_active != 1 or routers.running[0].core.context.is_recovering:
            self._unsettled.append(self._world.time.now)
        is_undecided = n_active != 1 and self._hear_each_other(routers)
        self._undecided_s = (self._undecided_s + seconds) * is_undecided
        if self._undecided_s == UNDECIDED_S:
            text = f"{n_active} of the two are active, and they hear each other"
            self._world.oracles.broken("one_router", "", text)

    def unsettled(self, since: float, until: float) -> int:
        """Seconds between the two for which no router, or more than one, served the fleet."""
        return sum(since < moment < until for moment in self._unsettled)

    def _needless(self, process: PairNode) -> str:
        """Why it should not have taken over from one that is active; empty if it had to."""
        now = self._world.time.now
        if self._world.is_unreliable:
            return ""  # it may not have heard it
        has_just_begun = now - process.born_at < LEASES.silence_s + 2 * TICK_S
        if now - process.asked_at > ASKED_S + TICK_S and not has_just_begun:
            return "although no member has asked it for a router"
        if now - process.heard_at < LEASES.silence_s:
            return "although it hears the other one"
        if now - max(process.woke_at, process.born_at) < LEASES.silence_s:
            return "before it could hear the other one"
        return ""

    def _hear_each_other(self, routers: RouterPair) -> bool:
        one, other = routers.processes.values()
        weather = self._world.weather
        return (
            one.is_alive
            and other.is_alive
            and not one.is_frozen
            and not other.is_frozen
            and not weather.is_cut(one.name, other.name)
            and not weather.is_cut(other.name, one.name)
        )

    def _pair(self) -> RouterPair:
        routers = self._world.routers
        assert isinstance(routers, RouterPair)
        return routers
