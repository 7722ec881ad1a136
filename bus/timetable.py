"""When each thing is due next: a heap with one live time per key."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MIN_STALE = 1024
"""Below this many outdated heap items, sweeping them is not worth it."""


class Timetable(Generic[Key]):
    """Setting a key again moves it; outdated heap items are skipped, and swept in time."""

    def __init__(self) -> None:
        self._when: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._n_set = 0

    def __len__(self) -> int:
        return len(self._when)

    def set(self, key: Key, when: float) -> None:
        """`key` is due at `when`, and at no other time."""
        self._n_set += 1
        self._when[key] = (when, self._n_set)
        heapq.heappush(self._heap, (when, self._n_set, key))

    def cancel(self, key: Key) -> None:
        """`key` is not due any more; unknown keys are ignored."""
        if self._when.pop(key, None) is None:
            return
        if len(self._heap) > MIN_STALE + 2 * len(self._when):
            self._heap = [(when, order, key) for key, (when, order) in self._when.items()]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[Key]:
        """Returns the keys that are due, in order, and removes them from the table."""
        found: list[Key] = []
        while self._heap and self._heap[0][0] <= now:
            when, order, key = heapq.heappop(self._heap)
            if self._when.get(key) == (when, order):
                del self._when[key]
                found.append(key)
        return found
