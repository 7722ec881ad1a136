"""Who may join the queue: room, fair shares, and time enough; everybody else is told `busy`.

Spec: docs/protocol.md, "Overload".
"""

from bus.backoff import Chance
from router.context import Context, refusal
from router.lane import Lane
from router.requests import Request
from router.table import RequestTable

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
        waiting, client = self._table.waiting, request.client
        if request.state == "parked":
            lane = None  # somebody may run it already
        run_s = lane.pace.least_s(request.place.cost) if lane is not None else 0.0
        left_s = request.deadline_at - now - run_s
        if lane is not None and not lane.is_surely_short(left_s, now):
            wait_s = lane.least_wait_s(client, request.place.priority, now)
            if wait_s > left_s:
                hint = f"it would wait about {wait_s:.0f} s and has to start within {left_s:.1f} s"
                self._refuse(request, hint)
                return False
        if waiting.has_room(len(request.body)):
            return True
        displaced = waiting.to_displace(client, len(request.body))
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
