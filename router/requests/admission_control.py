"""Who may join the queue: room, fair shares, and time enough; everybody else is told `busy`.

Spec: docs/protocol.md, "Overload".
"""

from rolloutbus.bus.backoff import Chance
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.requests.lane import Lane
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable

BUSY_RETRY_MS = 200
"""A refused client waits between this and twice this."""


class Door:
    """Guards the waiting room."""

    def __init__(self, context: Context, table: RequestTable, chance: Chance) -> None:
        self._context = context
        self._table = table
        self._chance = chance

    def admits(self, request: Request, lane: Lane | None, now: float) -> bool:
        """Whether there is room and time for it; if not, it is refused. May push another out."""
        waiting = self._table.waiting
        if request.state == "parked":
            lane = None  # somebody may run it already
        hint = _too_late(request, lane, now) if lane is not None else ""
        if hint:
            self._refuse(request, hint)
            return False
        if waiting.has_room(len(request.body)):
            return True
        displaced = waiting.to_displace(request)
        if displaced is None:
            hint = f"{len(waiting)} requests wait already; submit again later"
            self._refuse(request, hint)
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
    """Why it could not end before its deadline, as far as can be told; else empty."""
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
