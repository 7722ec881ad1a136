"""Endings that their client has not acknowledged yet, and when each is sent again.

Nothing but the client's acknowledgement (or a fence, or age) removes an ending: the router's
receipt frees nothing. Spec: docs/protocol.md, "Delivery".
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from bus.codec import pack
from bus.entry import NO_BODY, Entry
from bus.ids import Attempt, AttemptKey, RequestId
from bus.messages.endings import Problem
from bus.settings import LeaseSettings

MAX_BYTES = 1 << 30
MAX_AGE_S = 3600.0
MAX_BYTES_PER_TICK = 16 << 20
"""Re-sent at most per tick, so that a reconnection does not delay beats."""
HEADER_BYTES = 200
"""Counted per ending besides its body."""

_OVERFLOW = pack(
    Problem(
        code="internal",
        message="The result was dropped: too many results wait for their clients to fetch them.",
        outcome="failed",
    )
)
SMALL_BYTES = HEADER_BYTES + len(_OVERFLOW)
"""An ending that counts for less is never replaced."""


@dataclass(slots=True)
class Parcel:
    """One ending under way."""

    command: str
    """Kind of the command that ended."""
    entry: Entry
    put_at: float
    due_at: float
    wait_s: float

    @property
    def has_result(self) -> bool:
        """Whether its body is the result of a `generate`."""
        is_result = self.command == "generate" and self.entry.kind in ("finished", "cancelled")
        return is_result and len(self.entry.body) > len(NO_BODY)

    @property
    def size_bytes(self) -> int:
        """What it counts against the bound."""
        return len(self.entry.body) + HEADER_BYTES


class Outbox:
    """Ordered by age; bounded by bytes and age."""

    def __init__(self, settings: LeaseSettings, limit_bytes: int = MAX_BYTES) -> None:
        self._settings = settings
        self._limit_bytes = limit_bytes
        self._parcels: dict[tuple[str, Attempt], Parcel] = {}
        self._due: list[tuple[float, int, tuple[str, Attempt]]] = []
        self._n_put = 0
        self.n_overflows = 0
        self.size_bytes = 0
        """What all that waits counts; 0 if nothing does."""

    def __len__(self) -> int:
        return len(self._parcels)

    def __contains__(self, key: tuple[str, Attempt]) -> bool:
        return key in self._parcels

    def get(self, key: tuple[str, Attempt]) -> Parcel | None:
        """The ending of one execution, if it still waits."""
        return self._parcels.get(key)

    def addressed(self) -> Iterator[tuple[AttemptKey, str]]:
        """((rid, attempt), client) of everything that waits, oldest first."""
        for (rid, attempt), parcel in self._parcels.items():
            yield (RequestId(rid), attempt), parcel.entry.route

    def put(self, command: str, entry: Entry, now: float) -> None:
        """Keep an ending until it is acknowledged; its owner sends it the first time."""
        wait_s = self._settings.resend_first_s
        due_at = now + wait_s
        parcel = Parcel(command, entry, now, due_at, wait_s)
        key = (entry.rid, entry.attempt)
        self.drop((key,))
        self._parcels[key] = parcel
        self.size_bytes += parcel.size_bytes
        self._schedule(key, due_at)
        if self.size_bytes > self._limit_bytes:
            self._shed()

    def drop(self, keys: Iterable[tuple[str, Attempt]]) -> None:
        """Acknowledged or fenced: forget."""
        for key in keys:
            parcel = self._parcels.pop(key, None)
            if parcel is not None:
                self.size_bytes -= parcel.size_bytes
        if not self._parcels:
            self._due.clear()

    def due(self, epoch: str, now: float) -> list[Entry]:
        """What must be sent (again) now, under the present epoch."""
        entries: list[Entry] = []
        n_bytes = 0
        while self._due and self._due[0][0] <= now and n_bytes < MAX_BYTES_PER_TICK:
            due_at, _, key = heapq.heappop(self._due)
            parcel = self._parcels.get(key)
            if parcel is None or parcel.due_at != due_at:
                continue
            if now - parcel.put_at > MAX_AGE_S:
                self.drop((key,))
                continue
            factor = self._settings.resend_factor
            parcel.wait_s = min(parcel.wait_s * factor, self._settings.resend_max_s)
            parcel.due_at = now + parcel.wait_s
            self._schedule(key, parcel.due_at)
            n_bytes += parcel.size_bytes
            if parcel.entry.epoch != epoch:
                parcel.entry = msgspec.structs.replace(parcel.entry, epoch=epoch)
            entries.append(parcel.entry)
        return entries

    def due_now(self, keys: Iterable[tuple[str, Attempt]] | None, now: float) -> None:
        """Send these again at the next tick (None: all, after a hello)."""
        for key in tuple(self._parcels) if keys is None else keys:
            parcel = self._parcels.get(key)
            if parcel is not None and parcel.due_at > now:
                parcel.due_at = now
                parcel.wait_s = self._settings.resend_first_s / self._settings.resend_factor
                self._schedule(key, now)

    def _schedule(self, key: tuple[str, Attempt], due_at: float) -> None:
        self._n_put += 1
        heapq.heappush(self._due, (due_at, self._n_put, key))

    def _shed(self) -> None:
        """Replace the oldest large bodies: the command still ends, its result is gone.

        When small ones alone are too many, the oldest are dropped.
        """
        limit_bytes = self._limit_bytes
        while self.size_bytes > limit_bytes and len(self._parcels) * SMALL_BYTES > limit_bytes:
            self.drop((next(iter(self._parcels)),))
            self.n_overflows += 1
        for parcel in self._parcels.values():
            if self.size_bytes <= self._limit_bytes:
                return
            if len(parcel.entry.body) > len(_OVERFLOW):
                self.size_bytes -= len(parcel.entry.body) - len(_OVERFLOW)
                parcel.entry = msgspec.structs.replace(parcel.entry, kind="failed", body=_OVERFLOW)
                self.n_overflows += 1
