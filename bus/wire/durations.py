"""Durations, counted by range: what travels of them, and a counter. Pure.

Spec: docs/protocol.md, "Counters".
"""

from bisect import bisect_left
from typing import Annotated

import msgspec

from rolloutbus.bus.wire.limits import MAX_KINDS, Natural, Short

BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
"""Largest duration of each range, in seconds; what is longer falls into one more."""
MAX_RANGES = 64


class Durations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations that were measured since a process started."""

    counts: Annotated[list[Natural], msgspec.Meta(max_length=MAX_RANGES)]
    """How many fell into each range of `BOUNDS_S`, and into the one after these."""
    total_s: float
    """Their sum."""


DurationsByName = Annotated[dict[Short, Durations], msgspec.Meta(max_length=MAX_KINDS)]


class DurationCounter:
    """Counts durations by range."""

    __slots__ = ("_counts", "_total_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float, n: int = 1) -> None:
        """Count `n` durations of this length."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += n
        self._total_s += seconds * n

    @property
    def has_any(self) -> bool:
        """Whether anything was measured."""
        return any(self._counts)

    def counted(self) -> Durations:
        """All so far."""
        return Durations(list(self._counts), self._total_s)
