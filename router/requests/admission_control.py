"""Which requests may join the queue: by room, fair share and time left; others end as `busy`.

Spec: docs/protocol.md, "Overload".
"""

from collections import Counter

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.limits import MAX_PRIORITY
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.validation import MAX_COST, check_placement, check_rid
from rolloutbus.bus.wire.versions import VersionRule, parse_versions
from rolloutbus.router.context import Context, check_deadline, refusal
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.records import SMALL_OUTBOX
from rolloutbus.router.requests.lane import Lane
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable

MAX_ENDINGS = 8192
MAX_BYTES = 512 << 20
"""Of one client, at all workers together."""
MAX_NAMES = 2
"""A principal may have so many times that, under all its names."""
RETRY_MS = 1000


class Backlogs:
    """Clients and principals with too many results that they have not acknowledged."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._clients: dict[str, str] = {}
        """Name -> what waits, as a sentence; of principals likewise."""
        self._principals: dict[str, str] = {}

    def problem_of(self, client: ClientRecord) -> Problem | None:
        """Why this client gets no new work, if it does not."""
        if not (self._clients or self._principals):
            return None
        why = self._clients.get(client.name) or self._principals.get(client.principal)
        if why is None:
            return None
        return refusal("busy", why, retry_after_ms=RETRY_MS)

    def tick(self) -> None:
        """Look at what the workers said last."""
        laden = self._context.members.laden()
        if not laden:
            self._clients, self._principals = {}, {}
            return
        n_endings, n_bytes = Counter[str](), Counter[str]()
        for member in laden:
            if len(member.outbox) >= SMALL_OUTBOX:
                n_endings.update(member.outbox.values())
            n_bytes.update(member.backlog)
        self._clients = _too_much(n_endings, n_bytes, 1, "this client")
        named = self._context.clients.named
        of_principals = Counter[str](), Counter[str]()
        for counts, sums in zip((n_endings, n_bytes), of_principals, strict=True):
            for name, count in counts.items():
                client = named(name)
                sums[client.principal if client is not None else name] += count
        self._principals = _too_much(*of_principals, MAX_NAMES, "the clients of this key")


def _too_much(
    n_endings: Counter[str], n_bytes: Counter[str], times: int, who: str
) -> dict[str, str]:
    return {
        name: f"{who} did not acknowledge {n_endings[name]} endings of {n_bytes[name] >> 20} MiB; "
        f"{times * MAX_ENDINGS} and {times * MAX_BYTES >> 20} MiB may wait: acknowledge them first"
        for name in {*n_endings, *n_bytes}
        if n_endings[name] >= times * MAX_ENDINGS or n_bytes[name] >= times * MAX_BYTES
    }


REMEMBERED = 10_000
"""The texts come from peers: after this many the memory starts afresh."""


class HeaderValidation:
    """Checks of a `generate`'s header, and version rules by their text."""

    def __init__(self, backlogs: Backlogs) -> None:
        self._backlogs = backlogs
        self._passed: set[tuple[str, str, str, str, str]] = set()
        """(policy, versions, session, group, worker) of placements that were found good: clients
        send the same ones for ever, and their patterns cost more than all else in a dispatch."""
        self._last: Placement | None = None
        """The last one that passed: the samples of one prompt come one after the other."""
        self._rules: dict[str, VersionRule] = {}

    def problem_of(self, client: ClientRecord, entry: Entry) -> Problem | None:
        """Why this `generate` is refused, or None."""
        place = entry.place
        if place is None:
            return Problem("bad_request", "say where to place it", "not_started", "place")
        if not is_sound(client, entry):
            return _unsoundness(client, entry)
        problem = None if place == self._last else self._problem_with(place)
        if place.priority and problem is None:
            problem = _beyond_rights(client, place.priority)
        return problem or self._backlogs.problem_of(client)

    def _problem_with(self, place: Placement) -> Problem | None:
        key = (place.policy, place.versions, place.session, place.group, place.worker)
        is_known = (
            key in self._passed
            and 0 <= place.cost <= MAX_COST
            and -MAX_PRIORITY <= place.priority <= MAX_PRIORITY
        )
        if not is_known:
            problem = check_placement(place)
            if problem is not None:
                return problem
            if len(self._passed) >= REMEMBERED:
                self._passed.clear()
            self._passed.add(key)
        self._last = place
        return None

    def rule(self, text: str) -> VersionRule | None:
        """The rule of a text that passed; None for `any`, which needs no test."""
        if text == "any":
            return None
        rule = self._rules.get(text)
        if rule is None:
            parsed = parse_versions(text)
            if isinstance(parsed, Problem):
                return None
            if len(self._rules) >= REMEMBERED:
                self._rules.clear()
            rule = self._rules[text] = parsed
        return rule


def is_sound(client: ClientRecord, entry: Entry) -> bool:
    """Whether the header of a client's `generate` is valid, its placement aside."""
    return entry.deadline_ms > 0 and not entry.route and client.match_rid(entry.rid) is not None


def _unsoundness(client: ClientRecord, entry: Entry) -> Problem | None:
    if entry.deadline_ms <= 0:
        return check_deadline(entry)
    if entry.route:
        message = "a generate is placed by the router; leave the route empty"
        return Problem("bad_request", message, "not_started", "route")
    return check_rid(entry.rid, client=client.name)


def _beyond_rights(client: ClientRecord, priority: int) -> Problem | None:
    low, high = client.priorities
    if low <= priority <= high:
        return None
    message = (
        f"the key of {client.principal[:64]!r} may ask for priorities {low} to {high}, not "
        f"{priority}; its `priorities` in the allow-list say so"
    )
    return Problem("forbidden", message, "not_started", "place.priority")


BUSY_RETRY_MS = 200


class AdmissionControl:
    """Guards the waiting room."""

    def __init__(self, context: Context, table: RequestTable, chance: Chance) -> None:
        self._context = context
        self._table = table
        self._chance = chance

    def admits(self, request: Request, lane: Lane | None, now: float) -> bool:
        """Whether there is room and time for it; if not, it is refused. May push another out.

        One that somebody may run is not refused: its client hears nothing, and sends it again.
        """
        waiting = self._table.waiting
        may_run = request.may_run_elsewhere
        hint = _too_late(request, lane, now) if lane is not None and not may_run else ""
        if hint:
            self._refuse(request, hint)
            return False
        if waiting.has_room(len(request.body)):
            return True
        displaced = waiting.to_displace(request)
        if displaced is None:
            if not may_run:
                self._refuse(request, f"{len(waiting)} requests wait already; submit again later")
            return False
        displaced.advance("displaced")
        self._refuse(displaced, "clients with less in the queue need its place")
        self._table.forget(displaced)
        return True

    def _refuse(self, request: Request, message: str) -> None:
        self._context.count("busy_refused")
        retry_after_ms = BUSY_RETRY_MS + int(BUSY_RETRY_MS * self._chance.random())
        problem = refusal("busy", message, retry_after_ms=retry_after_ms)
        self._context.refuse(request.client, request.rid, problem)


def _too_late(request: Request, lane: Lane, now: float) -> str:
    """Why a request cannot end before its deadline, as far as is known; else empty."""
    run_s = lane.paces.least_s(request.principal, request.place.cost)
    left_s = request.deadline_at - now - run_s
    if left_s <= 0 and run_s:
        return (
            f"it would run for about {run_s:.1f} s, as others of this client do, and its deadline "
            f"is in {request.deadline_at - now:.1f} s; give it more time"
        )
    if lane.is_surely_short(left_s, now):
        return ""
    wait_s = lane.least_wait_s(request, now)
    if wait_s <= left_s:
        return ""
    return f"it would wait about {wait_s:.0f} s and has to start within {left_s:.1f} s"
