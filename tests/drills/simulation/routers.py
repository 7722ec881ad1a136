"""The routers of one run: which one new connections come to, and whether there are several."""

from collections.abc import Callable, Sequence

from tests.drills.simulation.process import BACK, BACK_2, FRONT, FRONT_2, ROUTERS
from tests.drills.simulation.sim_pair import PairNode
from tests.drills.simulation.sim_router import RouterNode
from tests.drills.simulation.virtual_time import VirtualTime

SPLIT_AFTERMATH_S = 4.0
"""What the lost one of two routers has said is obeyed until its leases are over."""
RESTART_S = 1.0
"""A supervisor starts a router in the place of one that left."""


class History:
    """All routers that ever served; the latest one last."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.all: list[RouterNode] = []
        self._split_until = 0.0

    @property
    def running(self) -> list[RouterNode]:
        """Those that serve."""
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


class Routers(History):
    """One router after the other at one address, or by mistake two at once."""

    front, back = FRONT, BACK
    names: Sequence[str] = ROUTERS[:1]
    """In the network."""

    def __init__(self, time: VirtualTime, make: Callable[[], RouterNode]) -> None:
        super().__init__(time)
        self._make = make
        self.current = make()
        """Where new connections come to."""
        self.all.append(self.current)

    @property
    def active(self) -> RouterNode:
        """The process that serves."""
        return self.current

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


class RouterPair(History):
    """Two router processes, one of which stands by."""

    front, back = f"{FRONT},{FRONT_2}", f"{BACK},{BACK_2}"
    names: Sequence[str] = ROUTERS
    """Of the processes, the first one first."""

    def __init__(self, time: VirtualTime, make: Callable[[str], PairNode]) -> None:
        super().__init__(time)
        self._make = make
        self.processes = {name: make(name) for name in self.names}

    def began(self, router: RouterNode) -> RouterNode:
        """A process has become active."""
        self.all.append(router)
        return router

    @property
    def current(self) -> RouterNode:
        """The latest one that became active, of those that are if there are any."""
        return (self.running or self.all)[-1]

    @property
    def active(self) -> PairNode:
        """The process that became active last of those that are, or else the first one."""
        found = (
            each for each in self.processes.values() if self.all and each.serving is self.current
        )
        return next(found, self.processes[ROUTERS[0]])

    @property
    def second(self) -> PairNode:
        """The process beside `active`."""
        return self.processes[self.active.other]

    def revive(self) -> None:
        """Processes in the place of those that died."""
        for name, process in self.processes.items():
            if not process.is_alive:
                self.processes[name] = self._make(name)
