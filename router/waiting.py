"""The router's queue: bounded, by priority, then first come first served.

Requests with the same policy and version rule wait in one lane, so a lane whose weights nobody
has yet never stands in the way of the others.
"""

import heapq
from collections.abc import Iterator

from router.requests import Request

LaneKey = tuple[str, str]
"""(policy, version rule)."""


class WaitingRoom:
    """Queued requests; removal is lazy, a request that left `queued` is skipped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lanes: dict[LaneKey, list[tuple[int, int, Request]]] = {}
        self._waiting: dict[str, Request] = {}
        self.is_empty = True
        """Nobody waits; an attribute, because each `generate` asks."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._waiting.values()))

    @property
    def is_full(self) -> bool:
        """No more may wait."""
        return len(self._waiting) >= self._limit

    def has_lane(self, request: Request) -> bool:
        """Whether others with the same needs wait already."""
        return _lane_key(request) in self._lanes

    def add(self, request: Request) -> None:
        """Wait; a request that comes back keeps its old place in line."""
        lane = self._lanes.setdefault(_lane_key(request), [])
        heapq.heappush(lane, (-request.place.priority, request.order, request))
        self._waiting[request.rid] = request
        self.is_empty = False

    def remove(self, request: Request) -> None:
        """Stop waiting, if it does."""
        self._waiting.pop(request.rid, None)
        self.is_empty = not self._waiting

    def lanes(self) -> list[LaneKey]:
        """Lanes that may hold somebody."""
        return list(self._lanes)

    def first(self, key: LaneKey) -> Request | None:
        """Who is next in a lane; drops the lane when it is empty."""
        lane = self._lanes.get(key)
        while lane:
            request = lane[0][2]
            if request.state == "queued" and self._waiting.get(request.rid) is request:
                return request
            heapq.heappop(lane)
        self._lanes.pop(key, None)
        return None


def _lane_key(request: Request) -> LaneKey:
    return (request.place.policy, request.place.versions)
