"""Time as an argument: seconds that never jump, and a clock that tests can turn."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; only differences mean anything."""

    def now(self) -> float:
        """Seconds."""
        ...


class BootClock:
    """CLOCK_BOOTTIME: unlike CLOCK_MONOTONIC it counts time asleep, so leases expire meanwhile."""

    def now(self) -> float:
        """Seconds since boot."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """Stands still until it is advanced."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds, as last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` >= 0."""
        if seconds < 0:
            msg = "a clock only moves forward"
            raise ValueError(msg)
        self._now += seconds
