"""Endings that their client has not acknowledged yet, and when each is sent again.

Nothing but the client's acknowledgement (or a fence, or age) removes an ending: the router's
receipt frees nothing. Spec: docs/protocol.md, "Delivery".
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgspec

from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Attempt, Entry
from rolloutbus.bus.wire.messages.endings import Problem

MAX_BYTES = 1 << 30
MAX_AGE_S = 3600.0
MAX_BYTES_PER_TICK = 16 << 20
"""Re-sent at most per tick, so that a reconnection does not delay heartbeats."""
MAX_ENTRIES_PER_TICK = 1000
"""Likewise: many small ones keep the router from its leases."""
MAX_NEWS = 5000
"""A heartbeat tells of at most so many endings, that came or went: the next one goes on."""
MANY = 256
MUCH_BYTES = 16 << 20
"""A heartbeat names the clients that have so many endings here, or such large ones."""
MAX_NAMED = 100
"""Clients that it names, those with the most first."""
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
    n_sent: int = 1

    @property
    def has_result(self) -> bool:
        """Whether its body is the result of a `generate`."""
        is_result = self.command == "generate" and self.entry.kind in ("finished", "cancelled")
        return is_result and len(self.entry.body) > len(NO_BODY)

    @property
    def size_bytes(self) -> int:
        """Bytes that it counts against the bound."""
        return len(self.entry.body) + HEADER_BYTES


class _Account:
    """Endings that one client has not acknowledged, the oldest first."""

    __slots__ = ("keys", "large", "n_bytes")

    def __init__(self) -> None:
        self.keys: dict[tuple[str, Attempt], None] = {}
        self.large: dict[tuple[str, Attempt], None] = {}
        """Those whose bodies are worth replacing."""
        self.n_bytes = 0


class News(NamedTuple):
    """Changes of an outbox since the last report."""

    is_whole: bool
    """Everything before this is to be forgotten."""
    came: list[tuple[str, Attempt, str]]
    """(rid, attempt, client)."""
    went: list[tuple[str, Attempt]]


class Outbox:
    """Ordered by age; bounded by bytes and age."""

    def __init__(self, settings: LeaseSettings, limit_bytes: int = MAX_BYTES) -> None:
        self._settings = settings
        self._limit_bytes = limit_bytes
        self._parcels: dict[tuple[str, Attempt], Parcel] = {}
        self._due: list[tuple[float, int, tuple[str, Attempt]]] = []
        self._accounts: dict[str, _Account] = {}
        """By client."""
        self._news: dict[tuple[str, Attempt], bool] = {}
        """What has come (or gone) and was not told."""
        self._reports_all = True
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

    def report_all(self) -> None:
        """Report everything again: the router knows nothing, or has missed something."""
        self._news = dict.fromkeys(self._parcels, True)
        self._reports_all = True

    def take_news(self) -> News:
        """Take the changes since the last call, or the next part of them."""
        came: list[tuple[str, Attempt, str]] = []
        went: list[tuple[str, Attempt]] = []
        for key in list(islice(self._news, MAX_NEWS)):
            if self._news.pop(key):
                came.append((*key, self._parcels[key].entry.route))
            else:
                went.append(key)
        is_whole, self._reports_all = self._reports_all, False
        return News(is_whole, came, went)

    def backlog(self) -> list[tuple[str, int, int]]:
        """(client, endings, bytes) of clients that have many here, or large ones."""
        if len(self._parcels) < MANY and self.size_bytes < MUCH_BYTES:
            return []
        found = [
            (client, len(each.keys), each.n_bytes)
            for client, each in self._accounts.items()
            if len(each.keys) >= MANY or each.n_bytes >= MUCH_BYTES
        ]
        return sorted(found, key=lambda row: (-row[2], -row[1]))[:MAX_NAMED]

    def put(self, command: str, entry: Entry, now: float) -> None:
        """Keep an ending until it is acknowledged; its owner sends it the first time."""
        due_at = now + self._settings.resend_first_s
        parcel = Parcel(command, entry, now, due_at)
        key = (entry.rid, entry.attempt)
        self.drop((key,))
        self._parcels[key] = parcel
        self._news[key] = True
        self.size_bytes += parcel.size_bytes
        account = self._accounts.get(entry.route)
        if account is None:
            account = self._accounts[entry.route] = _Account()
        account.keys[key] = None
        account.n_bytes += parcel.size_bytes
        if parcel.size_bytes > SMALL_BYTES:
            account.large[key] = None
        self._schedule(key, due_at)
        if self.size_bytes > self._limit_bytes:
            self._shed()

    def drop(self, keys: Iterable[tuple[str, Attempt]]) -> None:
        """Acknowledged or fenced: forget."""
        for key in keys:
            parcel = self._parcels.pop(key, None)
            if parcel is None:
                continue
            self.size_bytes -= parcel.size_bytes
            if not self._news.pop(key, False):  # else nobody has heard that it came
                self._news[key] = False
            account = self._accounts[parcel.entry.route]
            account.n_bytes -= parcel.size_bytes
            del account.keys[key]
            account.large.pop(key, None)
            if not account.keys:
                del self._accounts[parcel.entry.route]
        if not self._parcels:
            self._due.clear()

    def due(self, epoch: str, now: float) -> list[Entry]:
        """Entries that must be sent (again) now, under the present epoch."""
        entries: list[Entry] = []
        n_bytes = 0
        while self._due and self._due[0][0] <= now and self._may_send(n_bytes, entries):
            due_at, _, key = heapq.heappop(self._due)
            parcel = self._parcels.get(key)
            if parcel is None or parcel.due_at != due_at:
                continue
            if now - parcel.put_at > MAX_AGE_S:
                self.drop((key,))
                continue
            parcel.n_sent += 1
            parcel.due_at = now + self._settings.resend_after(parcel.n_sent)
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
                parcel.n_sent = 0
                self._schedule(key, now)

    def _schedule(self, key: tuple[str, Attempt], due_at: float) -> None:
        self._n_put += 1
        heapq.heappush(self._due, (due_at, self._n_put, key))

    @staticmethod
    def _may_send(n_bytes: int, entries: list[Entry]) -> bool:
        return n_bytes < MAX_BYTES_PER_TICK and len(entries) < MAX_ENTRIES_PER_TICK

    def _shed(self) -> None:
        """Replace the oldest large bodies of the client that has most here, until all fits.

        The command still ends, its result is gone. Who has only small ones loses the oldest.
        """
        while self.size_bytes > self._limit_bytes:
            account = max(self._accounts.values(), key=lambda each: each.n_bytes)
            self.n_overflows += 1
            if not account.large:
                self.drop((next(iter(account.keys)),))
                continue
            key = next(iter(account.large))
            del account.large[key]
            parcel = self._parcels[key]
            n_less = len(parcel.entry.body) - len(_OVERFLOW)
            self.size_bytes -= n_less
            account.n_bytes -= n_less
            parcel.entry = msgspec.structs.replace(parcel.entry, kind="failed", body=_OVERFLOW)
