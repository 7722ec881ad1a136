"""Detached requests that are over for their callers: whatever else is heard of them is void.

Client, router and workers each remember some, so that no two of them can forget it together.
Spec: docs/protocol.md, "Detached requests", 6.
"""

from collections.abc import Iterator

OVER_S = 3600.0
"""An execution that nobody counts on any more may run, and its ending wait, for so long."""
TOLD_AGAIN = 1000
"""A client or a worker remembers so many, and tells all of them to each new router."""


class OverRids:
    """The latest of them, oldest first; bounded by number and age."""

    def __init__(self, limit: int = TOLD_AGAIN) -> None:
        self._limit = limit
        self._until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, rid: str) -> bool:
        return rid in self._until

    def __iter__(self) -> Iterator[str]:
        return iter(self._until)

    def add(self, rid: str, now: float) -> None:
        """It has ended for its caller."""
        self._until.pop(rid, None)  # so that the dict stays ordered by age
        self._until[rid] = now + OVER_S
        if len(self._until) > self._limit:
            del self._until[next(iter(self._until))]

    def expire(self, now: float) -> None:
        """Forget the old ones."""
        while self._until:
            rid, until = next(iter(self._until.items()))
            if until > now:
                return
            del self._until[rid]
