"""One line of requests with equal needs: by priority, then clients take turns.

Removal is lazy: a request that waits here no more is skipped when its turn comes.
"""

import heapq

from router.requests import Request
from router.run_pace import RunPace
from router.service_rate import ServiceRate
from router.turns import Turns

Rank = tuple[int, bool, float, int]
"""(-priority, not a session's turn, pass of the client, arrival): the lowest is next."""

MIN_LEFT = 256
"""Below this many that have left, sweeping them is not worth it."""


class _Level:
    """The requests of one priority, a heap for each client."""

    def __init__(self, lane: "Lane") -> None:
        self._lane = lane
        self._turns = lane.turns
        self._queues: dict[str, list[tuple[int, Request]]] = {}
        self._heads: list[tuple[float, int, str]] = []
        """(pass, arrival, client); a pass only grows, so an old one is put right when it shows."""
        self.n_waiting: dict[str, int] = {}
        """Per client, without those that have left."""
        self._n_left = 0
        """Those that have left and are still in a queue, at most."""

    def add(self, request: Request) -> None:
        client = request.client
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = []
            head = (self._turns.pass_of(client), request.order, client)
            heapq.heappush(self._heads, head)
        heapq.heappush(queue, (request.order, request))
        self.n_waiting[client] = self.n_waiting.get(client, 0) + 1

    def discount(self, client: str) -> None:
        left = self.n_waiting.get(client, 0) - 1
        if left > 0:
            self.n_waiting[client] = left
        else:
            self.n_waiting.pop(client, None)
        self._n_left += 1
        if self._n_left > MIN_LEFT + 2 * self._lane.n_waiting:
            self._sweep()

    def _sweep(self) -> None:
        """Drop those that have left, wherever they stand: they may have large bodies."""
        self._n_left = 0
        for client, queue in list(self._queues.items()):
            queue[:] = [each for each in queue if each[1].lane is self._lane]
            heapq.heapify(queue)
            if not queue:
                del self._queues[client]
        self._heads = [head for head in self._heads if head[2] in self._queues]
        heapq.heapify(self._heads)

    def first(self) -> Request | None:
        heads = self._heads
        while heads:
            at, order, client = heads[0]
            queue = self._queues[client]
            while queue and queue[0][1].lane is not self._lane:
                heapq.heappop(queue)
            now_at = self._turns.pass_of(client)
            if not queue:
                heapq.heappop(heads)
                del self._queues[client]
            elif now_at > at or queue[0][0] > order:
                heapq.heapreplace(heads, (now_at, queue[0][0], client))
            else:
                return queue[0][1]
        return None


class Lane:
    """Requests that the same workers could serve."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.rate = ServiceRate()
        self.pace = RunPace()
        self.n_waiting = 0
        """Without those that have left."""
        self._levels: dict[int, _Level] = {}

    def add(self, request: Request) -> None:
        """Wait here."""
        priority = request.place.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(self)
        level.add(request)
        request.lane = self
        self.n_waiting += 1

    def served(self, request: Request, now: float) -> None:
        """A worker has its turn's request."""
        self.turns.charge(request.client, request.place.cost)
        self.rate.started(now)

    def discount(self, request: Request) -> None:
        """The request waits no more."""
        request.lane = None
        self.n_waiting -= 1
        if self.n_waiting:
            self._levels[request.place.priority].discount(request.client)
        else:
            self._levels.clear()

    def first(self) -> Request | None:
        """Who is next; None when nobody waits here any more."""
        for priority in sorted(self._levels, reverse=True):
            request = self._levels[priority].first()
            if request is not None:
                return request
            del self._levels[priority]
        return None

    def least_wait_s(self, client: str, priority: int, now: float) -> float:
        """At least how long a new request of this client would wait; 0 when there is no telling."""
        per_s = self.rate.per_s(now)
        return 0.0 if per_s is None else self._n_ahead(client, priority) / per_s

    def is_surely_short(self, wait_s: float, now: float) -> bool:
        """Whether even the last one here waits less than that; cheap."""
        per_s = self.rate.per_s(now)
        return per_s is None or self.n_waiting <= wait_s * per_s

    def rank(self, request: Request) -> Rank:
        """The place of this lane's first request among those of other lanes."""
        at = self.turns.pass_of(request.client)
        return -request.place.priority, not request.home, at, request.order

    def _n_ahead(self, client: str, priority: int) -> float:
        """At least how many start before a new request of this client would."""
        higher = sum(
            sum(level.n_waiting.values()) for each, level in self._levels.items() if each > priority
        )
        level = self._levels.get(priority)
        if level is None:
            return higher
        weight = self.turns.weight
        n_own = level.n_waiting.get(client, 0)
        # While its own requests take n_own turns, each of the others takes its share of turns.
        n_others = sum(
            min(n_waiting, (n_own + 1) * weight(other) / weight(client))
            for other, n_waiting in level.n_waiting.items()
            if other != client
        )
        return higher + n_own + n_others
