"""One line of requests with equal needs: by priority, then by fair share of principal and client.

Removal is lazy: a request that waits here no more is skipped when its turn comes.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from rolloutbus.router.requests.record import Request

REMEMBERED = 10_000
"""Names whose pass is kept; beyond it those that the clock has overtaken are forgotten."""


class Passes:
    """A pass for each name; the lowest goes first.

    It grows by cost / weight with every request that the name starts. A name that was idle cannot
    save up its share: when it starts a request its pass is first raised to the clock, which is the
    pass of the name that was served last.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._clock = 0.0
        self._passes: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._passes)

    def of(self, name: str) -> float:
        """Where a name stands; the lowest is next."""
        return self._passes.get(name, 0.0)

    def charge(self, name: str, cost: int) -> None:
        """It has started a request of `cost` estimated tokens."""
        start = max(self._clock, self.of(name))
        self._clock = start
        if len(self._passes) >= REMEMBERED and name not in self._passes:
            self._forget_overtaken(start)
        self._passes[name] = start + max(1, cost) / self._weights.get(name, 1.0)

    def _forget_overtaken(self, clock: float) -> None:
        passes = self._passes
        self._passes = {name: at for name, at in passes.items() if at > clock}
        if len(self._passes) > REMEMBERED // 2:
            # Newcomers do not move the clock. Half of the names are let off what they owe.
            middle = sorted(self._passes.values())[len(self._passes) // 2]
            self._passes = {name: at for name, at in self._passes.items() if at > middle}


class FairShares:
    """The passes of all principals of one policy, and of the names of each."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.principals = Passes(weights)
        self._names: dict[str, Passes] = {}
        """Principal -> the passes of its clients."""

    def weight(self, name: str) -> float:
        """Share of a principal or of a client, against 1.0 for one that no setting names."""
        return self._weights.get(name, 1.0)

    def clients_of(self, principal: str) -> Passes:
        """The passes of the clients of one principal."""
        names = self._names.get(principal)
        if names is None:
            if len(self._names) >= REMEMBERED:
                self._names.clear()  # what the names of one principal owe each other, no more
            names = self._names[principal] = Passes(self._weights)
        return names

    def charge(self, principal: str, client: str, cost: int) -> None:
        """The client of this principal has started a request of `cost` estimated tokens."""
        self.principals.charge(principal, cost)
        self.clients_of(principal).charge(client, cost)


WINDOW_S = 10
MIN_STARTS = 10
"""Below this many starts nothing is estimated: nobody is refused on a guess."""


class ServiceRate:
    """Starts per whole second; seconds without any are left out.

    That makes the estimate optimistic after a pause: what it says cannot be done, cannot.
    """

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        """(second, starts), oldest first."""

    def started(self, now: float) -> None:
        """One more request left the lane for a worker."""
        second = int(now)
        seconds = self._seconds
        if seconds and seconds[-1][0] == second:
            seconds[-1] = (second, seconds[-1][1] + 1)
            return
        seconds.append((second, 1))
        self._drop_old(second)

    def per_s(self, now: float) -> float | None:
        """Starts per second lately; None when too little is known.

        The first and the running second are part of the sum, not whole: both count for one.
        """
        self._drop_old(int(now))
        n_starts = sum(count for _, count in self._seconds)
        if n_starts < MIN_STARTS or len(self._seconds) < 2:  # noqa: PLR2004 - one may be a burst
            return None
        return n_starts / (len(self._seconds) - 1)

    def _drop_old(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()


FORGETS = 1.02
"""The pace slows down by this factor with each request that was slower."""
MIN_ENDED = 32
"""With fewer requests than that nothing is estimated: nobody is given up on a guess."""
MAX_PRINCIPALS = 10_000
"""After so many the memory starts afresh."""


class RunPaces:
    """Seconds per estimated token, from dispatch to ending, of each principal's requests.

    No principal is judged by what another one ran. What is estimated to be too late, is.
    """

    def __init__(self) -> None:
        self._by_principal: dict[str, tuple[float, int]] = {}

    def ended(self, principal: str, cost: int, seconds: float) -> None:
        """A request of `cost` estimated tokens has run for so long."""
        pace = seconds / max(1, cost)
        known, n_ended = self._by_principal.get(principal, (0.0, 0))
        if not n_ended and len(self._by_principal) >= MAX_PRINCIPALS:
            self._by_principal.clear()
        pace = min(pace, known * FORGETS) if known else pace
        self._by_principal[principal] = pace, n_ended + 1

    def least_s(self, principal: str, cost: int) -> float:
        """At least how long such a request will run; 0 when too little is known."""
        pace, n_ended = self._by_principal.get(principal, (0.0, 0))
        return pace * max(1, cost) if n_ended >= MIN_ENDED else 0.0


Rank = tuple[int, bool, float, int]
"""(-priority, not a session's turn, pass of the principal, arrival): the lowest is next."""

MIN_LEFT = 256
"""Below this many that have left, sweeping them is not worth it."""


class _Queue:
    """The requests of one client, by arrival."""

    def __init__(self, lane: "Lane") -> None:
        self._lane = lane
        self._requests: list[tuple[int, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._requests, (request.order, request))

    def first(self) -> Request | None:
        requests, lane = self._requests, self._lane
        while requests and requests[0][1].lane is not lane:
            heapq.heappop(requests)
        return requests[0][1] if requests else None

    def sweep(self) -> bool:
        """Drop those that have left; whether any is here still."""
        self._requests[:] = [each for each in self._requests if each[1].lane is self._lane]
        heapq.heapify(self._requests)
        return bool(self._requests)


class _Rota:
    """Lines that share workers fairly: the line with the lowest pass is next."""

    def __init__(self, pass_of: Callable[[str], float]) -> None:
        self._pass_of = pass_of
        self.lines: dict[str, _Rota | _Queue] = {}
        self._heads: list[tuple[float, int, str]] = []
        """(pass, arrival, name); a pass only grows, so an old one is put right when it shows."""

    def open(self, name: str, line: "_Rota | _Queue", order: int) -> None:
        """Add a new line; `order` is that of its first request."""
        self.lines[name] = line
        heapq.heappush(self._heads, (self._pass_of(name), order, name))

    def first(self) -> Request | None:
        heads = self._heads
        while heads:
            at, order, name = heads[0]
            request = self.lines[name].first()
            now_at = self._pass_of(name)
            if request is None:
                heapq.heappop(heads)
                del self.lines[name]
            elif now_at > at or request.order > order:
                heapq.heapreplace(heads, (now_at, request.order, name))
            else:
                return request
        return None

    def sweep(self) -> bool:
        """Drop those that have left; whether any is here still."""
        for name, line in list(self.lines.items()):
            if not line.sweep():
                del self.lines[name]
        self._heads = [head for head in self._heads if head[2] in self.lines]
        heapq.heapify(self._heads)
        return bool(self.lines)


class _Level:
    """The requests of one priority."""

    def __init__(self, lane: "Lane") -> None:
        self._lane = lane
        self._shares = lane.shares
        self._principals = _Rota(lane.shares.principals.of)
        self.n_waiting: dict[str, dict[str, int]] = {}
        """Principal -> client -> how many, without those that have left."""
        self._n_left = 0
        """Those that have left and are still in a queue, at most."""

    def add(self, request: Request) -> None:
        principal, client = request.principal, request.client
        names = self._principals.lines.get(principal)
        if names is None:
            shares = self._shares
            names = _Rota(lambda name: shares.clients_of(principal).of(name))
            self._principals.open(principal, names, request.order)
        assert isinstance(names, _Rota)
        queue = names.lines.get(client)
        if queue is None:
            queue = _Queue(self._lane)
            names.open(client, queue, request.order)
        assert isinstance(queue, _Queue)
        queue.add(request)
        waiting = self.n_waiting.setdefault(principal, {})
        waiting[client] = waiting.get(client, 0) + 1

    def discount(self, request: Request) -> None:
        waiting = self.n_waiting[request.principal]
        left = waiting[request.client] - 1
        if left > 0:
            waiting[request.client] = left
        else:
            del waiting[request.client]
            if not waiting:
                del self.n_waiting[request.principal]
        self._n_left += 1
        if self._n_left > MIN_LEFT + 2 * self._lane.n_waiting:  # they may have large bodies
            self._n_left = 0
            self._principals.sweep()

    def first(self) -> Request | None:
        return self._principals.first()

    def counts(self) -> Iterator[tuple[str, int]]:
        """(principal, how many of it wait)."""
        return ((name, sum(waiting.values())) for name, waiting in self.n_waiting.items())


class Lane:
    """Requests that the same workers could serve."""

    def __init__(self, shares: FairShares) -> None:
        self.shares = shares
        self.rate = ServiceRate()
        self.paces = RunPaces()
        self.n_waiting = 0
        """Without those that have left."""
        self._levels: dict[int, _Level] = {}

    def add(self, request: Request) -> None:
        """Wait here."""
        priority = request.place.priority
        if priority not in self._levels:
            self._levels[priority] = _Level(self)
        self._levels[priority].add(request)
        request.lane = self
        self.n_waiting += 1

    def served(self, request: Request, now: float) -> None:
        """A worker has its turn's request."""
        self.shares.charge(request.principal, request.client, request.place.cost)
        self.rate.started(now)

    def discount(self, request: Request) -> None:
        """The request waits no more."""
        request.lane = None
        self.n_waiting -= 1
        if self.n_waiting:
            self._levels[request.place.priority].discount(request)
        else:
            self._levels.clear()

    def first(self) -> Request | None:
        """Returns the next request; None when the lane is empty."""
        for priority in sorted(self._levels, reverse=True):
            request = self._levels[priority].first()
            if request is not None:
                return request
            del self._levels[priority]
        return None

    def least_wait_s(self, request: Request, now: float) -> float:
        """At least how long a new request would wait; 0 when there is no telling."""
        per_s = self.rate.per_s(now)
        return 0.0 if per_s is None else self._n_ahead(request) / per_s

    def is_surely_short(self, wait_s: float, now: float) -> bool:
        """Whether even the last one here waits less than that; cheap."""
        per_s = self.rate.per_s(now)
        return per_s is None or self.n_waiting <= wait_s * per_s

    def least_run_s(self, request: Request) -> float:
        """Seconds that the request will run at least, by the fastest of late."""
        return self.paces.least_s(request.principal, request.place.cost)

    def rank(self, request: Request) -> Rank:
        """Rank of this lane's first request among the first ones of other lanes."""
        at = self.shares.principals.of(request.principal)
        return -request.place.priority, not request.home, at, request.order

    def _n_ahead(self, request: Request) -> float:
        """At least how many start before a new request would."""
        priority = request.place.priority
        higher = sum(
            n for each, level in self._levels.items() if each > priority for _, n in level.counts()
        )
        level = self._levels.get(priority)
        if level is None:
            return higher
        own = level.n_waiting.get(request.principal, {})
        n_own = self._n_with(own.items(), request.client, own.get(request.client, 0))
        return higher + self._n_with(level.counts(), request.principal, n_own)

    def _n_with(self, waiting: Iterable[tuple[str, int]], name: str, n_own: float) -> float:
        """While its own requests start n_own times, the others start as often as weights say."""
        weight = self.shares.weight
        return n_own + sum(
            min(n_waiting, (n_own + 1) * weight(other) / weight(name))
            for other, n_waiting in waiting
            if other != name
        )
