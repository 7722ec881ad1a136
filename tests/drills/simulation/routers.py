"""The routers of one run: which one new connections come to, and whether there are several."""

from collections.abc import Callable

from tests.drills.simulation.sim_router import RouterNode
from tests.drills.simulation.virtual_time import VirtualTime

SPLIT_AFTERMATH_S = 4.0
"""What the lost one of two routers has said is obeyed until its leases are over."""
RESTART_S = 1.0
"""A supervisor starts a router in the place of one that left."""


class Routers:
    """All that were ever started; the latest one last."""

    def __init__(self, time: VirtualTime, make: Callable[[], RouterNode]) -> None:
        self._time, self._make = time, make
        self.current = make()
        """Where new connections come to."""
        self.all = [self.current]
        self._split_until = 0.0

    @property
    def running(self) -> list[RouterNode]:
        """Those that live."""
        return [each for each in self.all if each.is_alive]

    @property
    def is_split(self) -> bool:
        """Whether two routers may be obeyed."""
        if len(self.running) > 1:
            self._split_until = self._time.now + SPLIT_AFTERMATH_S
        return self._time.now < self._split_until

    def has_heard_of(self, rid: str) -> bool:
        """Whether any of them was asked for this request."""
        return any(router.has_heard_of(rid) for router in self.all)

    def replace(self) -> None:
        """New connections come to a new router; the old one is not told."""
        self.current = self._make()
        self.all.append(self.current)

    def revive(self) -> None:
        """A router in the place of one that died."""
        if not self.current.is_alive:
            self.replace()

    def stepped_down(self, router: RouterNode) -> bool:
        """A router left; whether another one has been there at the same time."""
        self.elect()
        others = [each for each in self.all if each is not router]
        return any(each.ended_at > router.born_at for each in others)

    def unite(self, *, keeps_first: bool) -> None:
        """An operator finds out that several routers run, and stops all but one."""
        running = self.running
        for router in running[1:] if keeps_first else running[:-1]:
            router.kill()
        self.elect()

    def elect(self) -> None:
        """New connections come to the latest router that runs, or soon to a new one."""
        running = self.running
        if not running:
            self._time.later(RESTART_S, self.revive)
        elif not self.current.is_alive:
            self.current = running[-1]
