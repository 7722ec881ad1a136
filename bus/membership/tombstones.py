"""What members, routers and clients remember of ended requests, bounded by number and age."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from rolloutbus.bus.wire.entry import Attempt

KEPT_S = 600.0
"""After this long without another crash a request is a stranger again."""
KEPT_MAX = 1000
"""More requests than that are not remembered; the oldest go first."""


class CrashWitness:
    """Requests under which the engine of this process died."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, float]] = {}
        """rid -> (crashes, crashes while nothing else ran, until when), the oldest first."""

    def saw(self, rids: Collection[str], now: float) -> None:
        """The engine died while these ran."""
        for rid in rids:
            n, n_alone, _ = self._seen.pop(rid, (0, 0, 0.0))
            self._seen[rid] = (n + 1, n_alone + (len(rids) == 1), now + KEPT_S)
        while len(self._seen) > KEPT_MAX:
            del self._seen[next(iter(self._seen))]

    def listed(self, now: float) -> list[tuple[str, int, int]]:
        """(rid, crashes, crashes while nothing else ran) of those that are not too old."""
        return [(rid, n, alone) for rid, (n, alone, until) in self._seen.items() if until > now]


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


ABORTED: Attempt = (2**63 - 1, 2**63 - 1)
"""Stands for every attempt: the request was aborted before it came here."""


class _Tombstone(NamedTuple):
    attempt: Attempt
    expires_at: float


class Tombstones:
    """Highest attempt that is over, per rid; forgotten after `ttl_s` or beyond `limit` rids."""

    def __init__(self, ttl_s: float, limit: int = 200_000) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._by_rid: dict[str, _Tombstone] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def put(self, rid: str, attempt: Attempt, now: float) -> None:
        """Remember that this attempt, and every lower one, is over."""
        old = self._by_rid.pop(rid, None)
        if old is not None and old.attempt > attempt:
            attempt = old.attempt
        # Popped and set again: the dict stays ordered by expiry.
        self._by_rid[rid] = _Tombstone(attempt, now + self._ttl_s)
        if len(self._by_rid) > self._limit:
            del self._by_rid[next(iter(self._by_rid))]

    def get(self, rid: str) -> Attempt | None:
        """Highest attempt known to be over; ABORTED when the request must not start at all."""
        found = self._by_rid.get(rid)
        return None if found is None else found.attempt

    def expire(self, now: float) -> None:
        """Forget what is older than the time to live."""
        while self._by_rid:
            rid, oldest = next(iter(self._by_rid.items()))
            if oldest.expires_at > now:
                return
            del self._by_rid[rid]
