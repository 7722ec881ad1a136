"""A simulated process: alive, frozen or dead; what reaches it while frozen waits."""

from collections.abc import Callable
from typing import Any

from tests.drills.simulation.virtual_time import VirtualTime

FRONT, BACK = "ipc:///sim/front", "ipc:///sim/back"
FRONT_2, BACK_2 = "ipc:///sim/front-2", "ipc:///sim/back-2"
"""Of the second router, where there is a pair of them."""
ROUTERS = ("router", "router2")
"""Names of the routers in the network; without a pair there is the first one only."""
TICK_S = 0.25
"""Several times as long as in the shells: what may wait for a tick waits long."""


class Process:
    """What all simulated processes have in common."""

    tick_s = TICK_S

    def __init__(self, name: str, time: VirtualTime) -> None:
        self.name = name
        self.time = time
        self.is_alive = True
        self.frozen_until = 0.0
        self.thawed_at = 0.0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_frozen(self) -> bool:
        """Stopped for now."""
        return self.time.now < self.frozen_until

    def start_ticking(self, phase: float) -> None:
        """Tick as long as it lives; `phase` in [0, 1) keeps processes from ticking in step."""
        self.time.later(self.tick_s * phase, self._on_tick)

    def tick(self) -> None:
        """Time passes."""
        raise NotImplementedError

    def freeze(self, for_s: float) -> None:
        """As SIGSTOP, and SIGCONT after `for_s`."""
        self.frozen_until = max(self.frozen_until, self.time.now + for_s)
        self.time.later(for_s, self._thaw)

    def hear(self, handle: Callable[..., None], *args: Any) -> None:  # noqa: ANN401 - passed on
        """Handle it now, when thawed, or never if the process is dead."""
        if not self.is_alive:
            return
        if self.time.now < self.frozen_until:
            self._backlog.append((handle, args))
        else:
            handle(*args)

    def _on_tick(self) -> None:
        if not self.is_alive:
            return
        if self.time.now >= self.frozen_until:
            self.tick()
        if self.is_alive:
            self.time.later(self.tick_s, self._on_tick)

    def _thaw(self) -> None:
        if not self.is_alive or self.time.now + 1e-9 < self.frozen_until:
            return
        self.frozen_until, self.thawed_at = 0.0, self.time.now
        backlog, self._backlog = self._backlog, []
        self.tick()  # timers go first: the worst order
        for handle, args in backlog:
            self.hear(handle, *args)
