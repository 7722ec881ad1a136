"""Virtual time for the shipped cores: one heap of events, one seed, one trace.

Two runs with the same seed make the same trace; nothing here reads a clock or waits.
"""

import heapq
import random
from array import array
from collections.abc import Callable

import xxhash


class VirtualTime:
    """Seconds that pass only when the next event is taken."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 1000.0
        self.n_events = 0
        """Events scheduled so far."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._moments = array("d")
        self._trace: list[bytes] = []

    @property
    def trace_hash(self) -> str:
        """Digest of everything recorded so far."""
        digest = xxhash.xxh3_64(self._moments.tobytes())
        for start in range(0, len(self._trace), 100):  # all of it would be a large buffer
            digest.update(b"".join(self._trace[start : start + 100]))
        return digest.hexdigest()

    @property
    def moments(self) -> list[float]:
        """When each of the things recorded so far happened."""
        return list(self._moments)

    def chance(self, name: str) -> random.Random:
        """A random source of its own for each component: one more draw here changes none there."""
        return random.Random(f"{self.seed}/{name}")

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do something after `delay_s` seconds; equal times keep their order."""
        self.n_events += 1
        heapq.heappush(self._events, (self.now + delay_s, self.n_events, action))

    def every(self, period_s: float, action: Callable[[], bool | None]) -> None:
        """Do something again and again, until it returns False."""

        def again() -> None:
            if action() is not False:
                self.later(period_s, again)

        self.later(period_s, again)

    def record(self, what: bytes) -> None:
        """Add what happens now to the trace."""
        self._moments.append(self.now)
        self._trace.append(what)

    def run_until(self, moment: float) -> None:
        """Take events in order until `moment`."""
        events, take = self._events, heapq.heappop
        while events and events[0][0] <= moment:
            self.now, _, action = take(events)
            action()
        self.now = max(self.now, moment)
