"""Commands that a member has taken and the endings it owes: each execution happens once.

Spec: docs/protocol.md, "Delivery".
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Raw

from rolloutbus.bus.actor.effects import Connect, Send, Stop
from rolloutbus.bus.membership.outbox import MAX_BYTES, Outbox
from rolloutbus.bus.membership.tombstones import ABORTED, SettledRequests, Tombstones
from rolloutbus.bus.security.principals import Principals
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Attempt, AttemptKey, Entry, Epoch, RequestId
from rolloutbus.bus.wire.messages.endings import AttemptList, Problem
from rolloutbus.bus.wire.messages.membership import Intent


class Execute(NamedTuple):
    """A command for this member, under its present lease, not seen before: carry it out.

    It ends with one call of `MemberCore.ended`, unless the lease or the execution is taken away.
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class StopWork:
    """The lease has ended: stop all commands that `Deliveries` does not count as running now."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopSilently:
    """These executions belong to another member now: stop them without an ending."""

    keys: list[AttemptKey]


@dataclass(frozen=True, slots=True)
class Heed:
    """The router has sent another intent: keep it beyond this process, if there is a place."""

    intent: Intent
    former_fleet: str
    """Identity of the fleet known before, if this is another one; else empty."""


@dataclass(frozen=True, slots=True)
class LetIn:
    """The router has handed over the allow-list: these may connect to what this member binds."""

    principals: Principals
    body: Raw
    """The same as it came, for other processes of this member."""


MemberEffect = Send | Connect | Stop | Execute | StopWork | StopSilently | Heed | LetIn


class Running(NamedTuple):
    """One execution that has begun and not ended."""

    attempt: Attempt
    client: str
    command: str
    epoch: Epoch


class Taken(NamedTuple):
    """Consequences of one command entry; at most one of the fields is not None."""

    execute: Execute | None = None
    ending: Entry | None = None
    """To be sent at once; it is in the outbox already."""
    forget: StopSilently | None = None
    """An older execution of the same rid that this one replaces; goes with `execute`."""


_NOTHING = Taken()
_NOT_HELD = pack(Problem("unknown_request", "This worker does not hold it.", "not_started"))


class Deliveries:
    """Running executions, endings that wait for their client, and memory of ended ones."""

    def __init__(self, settings: LeaseSettings, outbox_limit_bytes: int = MAX_BYTES) -> None:
        self._running: dict[str, Running] = {}
        self.begun: dict[AttemptKey, None] = {}
        """Executions begun since `take_begun` was called last, and still running."""
        self._detached: dict[str, tuple[Attempt, str]] = {}
        """rid -> (attempt, group) of those that go on without their client."""
        self.outbox = Outbox(settings, outbox_limit_bytes)
        self.tombstones = Tombstones(settings.tombstone_s)
        self.settled = SettledRequests()
        """Detached requests, as their clients said."""

    def running(self, rid: str) -> Running | None:
        """The execution of this rid, if it runs here."""
        return self._running.get(rid)

    def running_list(self) -> list[tuple[str, Attempt, str]]:
        """(rid, attempt, client) of everything that runs."""
        if not self._running:
            return []
        return [(rid, each.attempt, each.client) for rid, each in self._running.items()]

    def detached_list(self, came: Iterable[tuple[str, Attempt, str]]) -> list[tuple[str, str]]:
        """(rid, group) of detached requests that run, or that `came` reports as ended."""
        if not self._detached:
            return []
        reported = {(rid, attempt) for rid, attempt, _ in came}
        found: list[tuple[str, str]] = []
        for rid, (attempt, group) in list(self._detached.items()):
            if rid in self._running or (rid, attempt) in reported:
                found.append((rid, group))
            elif (rid, attempt) not in self.outbox:
                del self._detached[rid]
        return found

    def take(self, entry: Entry, now: float) -> Taken:
        """A command under the present lease: new, a copy, or out of date."""
        rid, attempt = RequestId(entry.rid), entry.attempt
        running = self._running.get(rid)
        if running is not None:
            if attempt == running.attempt:
                self.begun[rid, attempt] = None
            if attempt <= running.attempt:
                return _NOTHING
            self._end(rid, running.attempt, now)
            return self._begin(entry, StopSilently([(rid, running.attempt)]))
        ended = self.tombstones.get(rid)
        if (rid, attempt) in self.outbox:
            ended = attempt  # a detached one may wait for longer than tombstones last
        if ended is None and entry.kind == "attach":
            return Taken(ending=self._keep(entry, "refused", _NOT_HELD, now))
        if ended is None:
            return self._begin(entry)
        if ended == ABORTED:
            self.tombstones.put(rid, attempt, now)
            return Taken(ending=self._keep(entry, "cancelled", NO_BODY, now))
        if attempt <= ended:
            self.outbox.due_now(((rid, attempt),), now)
            return _NOTHING
        return self._begin(entry)

    def refuse(self, entry: Entry, kind: str, body: Raw, now: float) -> Entry:
        """Ends a command that cannot even be taken."""
        self.tombstones.put(entry.rid, entry.attempt, now)
        return self._keep(entry, kind, body, now)

    def end(self, kind: str, key: AttemptKey, body: Raw, now: float) -> Entry | None:
        """Ends a running execution; None if it does not run here (any more)."""
        rid, attempt = key
        running = self._running.get(rid)
        if running is None or running.attempt != attempt:
            return None
        self._end(rid, attempt, now)
        entry = Entry(kind, rid, attempt, running.epoch, running.client, body=body)
        self.outbox.put(running.command, entry, now)
        return entry

    def fence(self, items: AttemptList, now: float) -> list[AttemptKey]:
        """The router gave these executions to other members; returns the ones that run here."""
        stopped: list[AttemptKey] = []
        for rid, attempt in items:
            running = self._running.get(rid)
            if running is not None and running.attempt == attempt:
                self._end(RequestId(rid), attempt, now)
                stopped.append((RequestId(rid), attempt))
        self.outbox.drop(items)
        return stopped

    def acknowledge(self, items: AttemptList, settled: Iterable[str], now: float) -> None:
        """Forget endings that clients have; detached requests in `settled` have ended for them."""
        for rid, attempt in items:
            if (rid, attempt) in self.outbox:
                self.tombstones.put(rid, attempt, now)
        self.outbox.drop(items)
        self.settled.expire(now)
        for rid in settled:
            self.settled.add(rid, now)

    def take_begun(self) -> AttemptList:
        """Take all executions out of `begun`."""
        begun, self.begun = self.begun, {}
        return list(begun)

    def stop_all(self, now: float, *, but_detached: bool = False) -> None:
        """The lease has ended: running executions have no owner any more; endings stay.

        Of a detached request there may be no other trace: it goes on until it is fenced.
        """
        kept = {rid: each for rid, each in self._running.items() if rid in self._detached}
        kept = kept if but_detached else {}
        for rid, running in self._running.items():
            if rid not in kept:
                self.tombstones.put(rid, running.attempt, now)
        self._running = kept
        self.begun.clear()

    def bury(self, rids: Iterable[str], now: float) -> None:
        """Aborted before they came: they must not start when they do."""
        for rid in rids:
            if self.tombstones.get(rid) is None:
                self.tombstones.put(rid, ABORTED, now)

    def _begin(self, entry: Entry, forget: StopSilently | None = None) -> Taken:
        rid = RequestId(entry.rid)
        self._running[rid] = Running(entry.attempt, entry.route, entry.kind, Epoch(entry.epoch))
        self.begun[rid, entry.attempt] = None
        if entry.place is not None and entry.place.outlives_client:
            self._detached[rid] = (entry.attempt, entry.place.group)
        return Taken(execute=Execute(entry), forget=forget)

    def _end(self, rid: RequestId, attempt: Attempt, now: float) -> None:
        del self._running[rid]
        self.begun.pop((rid, attempt), None)
        self.tombstones.put(rid, attempt, now)

    def _keep(self, entry: Entry, kind: str, body: Raw, now: float) -> Entry:
        ending = Entry(kind, entry.rid, entry.attempt, entry.epoch, entry.route, body=body)
        self.outbox.put(entry.kind, ending, now)
        return ending
