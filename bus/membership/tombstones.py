"""What members, routers and clients remember of ended requests, bounded by number and age."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from rolloutbus.bus.wire.entry import Attempt

CRASH_S = 600.0
"""After this long without another crash a request is no suspect any more."""
MAX_CRASHED = 1000
SETTLED_S = 3600.0
"""An execution that no caller counts on any more may run, and its ending wait, for so long."""
MAX_SETTLED = 1000
"""A client or a worker remembers so many, and reports all of them to each new router."""
ABORTED: Attempt = (2**63 - 1, 2**63 - 1)
"""Stands for every attempt: the request was aborted before it came here."""

ValueT = TypeVar("ValueT")


class _Remembered(Generic[ValueT]):
    """A value per request id, forgotten after `ttl_s` or beyond `limit` ids, the oldest first."""

    def __init__(self, ttl_s: float, limit: int) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._by_rid: OrderedDict[str, tuple[ValueT, float]] = OrderedDict()
        """rid -> (value, when it expires), ordered by that. Not a dict: that would walk over all
        the places of those which are gone to find its first."""

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_rid)

    def get(self, rid: str) -> ValueT | None:
        """The value of this request; None if there is none."""
        found = self._by_rid.get(rid)
        return None if found is None else found[0]

    def expire(self, now: float) -> None:
        """Forget what is older than the time to live."""
        while self._by_rid:
            rid, (_, expires_at) = next(iter(self._by_rid.items()))
            if expires_at > now:
                return
            del self._by_rid[rid]

    def _set(self, rid: str, value: ValueT, now: float) -> None:
        self._by_rid.pop(rid, None)  # so that the dict stays ordered by expiry
        self._by_rid[rid] = (value, now + self._ttl_s)
        if len(self._by_rid) > self._limit:
            self._by_rid.popitem(last=False)


class Tombstones(_Remembered[Attempt]):
    """The highest ended attempt of each request, so that a late copy does not run it again."""

    def __init__(self, ttl_s: float, limit: int = 200_000) -> None:
        super().__init__(ttl_s, limit)

    def put(self, rid: str, attempt: Attempt, now: float) -> None:
        """This attempt and every lower one have ended; ABORTED: it must not start at all."""
        old = self.get(rid)
        self._set(rid, attempt if old is None or old < attempt else old, now)


class SettledRequests(_Remembered[None]):
    """Detached requests that have ended for their callers; later endings of them are ignored.

    Client, router and workers each remember some, so that no two of them can forget one together.
    Spec: docs/protocol.md, "Detached requests", 6.
    """

    def __init__(self, limit: int = MAX_SETTLED) -> None:
        super().__init__(SETTLED_S, limit)

    def add(self, rid: str, now: float) -> None:
        """This request has ended for its caller."""
        self._set(rid, None, now)


class CrashWitness(_Remembered[tuple[int, int]]):
    """Remembers the requests that ran when this worker's engine died, for each new router.

    A restarted router knows nothing of them, and what clients say of their own requests counts for
    nothing. Spec: docs/protocol.md, "Poison".
    """

    def __init__(self) -> None:
        super().__init__(CRASH_S, MAX_CRASHED)

    def saw(self, rids: Collection[str], now: float) -> None:
        """The engine died while these requests ran."""
        for rid in rids:
            n, n_alone = self.get(rid) or (0, 0)
            self._set(rid, (n + 1, n_alone + (len(rids) == 1)), now)

    def listed(self, now: float) -> list[tuple[str, int, int]]:
        """(rid, crashes, crashes while nothing else ran) of those that are not too old."""
        return [(rid, *value) for rid, (value, until) in self._by_rid.items() if until > now]
