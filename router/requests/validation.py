"""Whether a `generate` may enter the router; what passed once is not looked at closely again.

Spec: docs/protocol.md, "Limits".
"""

from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.validation import MAX_COST, MAX_PRIORITY, check_placement, check_rid
from rolloutbus.bus.wire.versions import VersionRule, parse_versions
from rolloutbus.router.context import check_deadline
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.requests.backpressure import Backlogs

REMEMBERED = 10_000
"""The texts come from peers: after this many the memory starts afresh."""


class Admission:
    """Checks of a `generate`'s header, and version rules by their text."""

    def __init__(self, backlogs: Backlogs) -> None:
        self._backlogs = backlogs
        self._passed: set[tuple[str, str, str, str]] = set()
        """(policy, versions, session, group) of placements that were found good: clients send
        the same ones for ever, and their patterns cost more than all else in a dispatch."""
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
        key = (place.policy, place.versions, place.session, place.group)
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
    """Whether the header of a client's `generate` is as it must be, its placement aside."""
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
