"""What is remembered of executions that are over, so that a late copy does not run them again."""

from typing import NamedTuple

from rolloutbus.bus.wire.ids import Attempt

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
