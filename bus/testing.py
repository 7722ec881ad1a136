"""Virtual time for the shipped cores: one heap of events, one seed, one trace.

Two runs with the same seed make the same trace; nothing here reads a clock or waits.
"""

import heapq
import random
from collections.abc import Callable

import xxhash


class VirtualTime:
    """Seconds that pass only when the next event is taken."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0
        self._trace = xxhash.xxh3_64()

    @property
    def trace_hash(self) -> str:
        """Digest of everything noted so far."""
        return self._trace.hexdigest()

    @property
    def n_events(self) -> int:
        """Events scheduled so far."""
        return self._n_events

    def chance(self, name: str) -> random.Random:
        """A random source of its own for each component: one more draw here changes none there."""
        return random.Random(f"{self.seed}/{name}")  # noqa: S311 - must repeat, keeps no secret

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something after `delay_s` seconds; equal times keep their order."""
        self._n_events += 1
        heapq.heappush(self._events, (self.now + delay_s, self._n_events, action))

    def every(self, period_s: float, action: Callable[[], bool | None]) -> None:
        """Do something again and again, until it returns False."""

        def again() -> None:
            if action() is not False:
                self.later(period_s, again)

        self.later(period_s, again)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self._trace.update(f"{self.now:.6f} {text}\n".encode())

    def run_until(self, moment: float, *, is_done: Callable[[], bool] | None = None) -> None:
        """Take events in order until `moment`, or until there is nothing left to wait for."""
        while self._events and self._events[0][0] <= moment:
            if is_done is not None and is_done():
                return
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = max(self.now, moment)
