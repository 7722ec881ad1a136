"""The router's queue: bounded, by priority, then fair between principals and their clients.

Requests with the same policy and version rule wait in one lane, so a lane whose weights nobody
has yet never stands in the way of the others.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rolloutbus.router.requests.lane import FairShares, Lane, Rank
from rolloutbus.router.requests.record import Request

LaneKey = tuple[str, str, bool, str, str]
"""(policy, version rule, whether it runs alone, worker that it waits for if it is a session's
turn, worker that it names)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait."""

    n_requests: int
    n_bytes: int
    """Of bodies, all together."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Shares of principals, and of clients among those of their principal, that are not 1.0."""

    def part(self, n_requests: int, n_bytes: int) -> float:
        """How much of the room so many fill."""
        return max(n_requests / self.n_requests, n_bytes / self.n_bytes)

    def weight(self, name: str) -> float:
        """Share of one name."""
        return self.weights.get(name, 1.0)


@dataclass(slots=True)
class _Share:
    """What one client has in the room."""

    requests: dict[str, Request] = field(default_factory=dict[str, Request])
    """By rid, the longest waiting first."""
    n_bytes: int = 0

    def filled(self, bounds: Bounds) -> float:
        """Part of the room."""
        return bounds.part(len(self.requests), self.n_bytes)


@dataclass(slots=True)
class _Principal:
    """What the clients of one principal have in the room."""

    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])
    weight: float = 0.0
    n_requests: int = 0
    n_bytes: int = 0

    def filled(self, bounds: Bounds) -> float:
        """Part of the room."""
        return bounds.part(self.n_requests, self.n_bytes)


class RequestQueue:
    """Queued requests; removal is lazy, a request that left `queued` is skipped."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lanes: dict[LaneKey, Lane] = {}
        self._shares: dict[str, FairShares] = {}
        self._principals: dict[str, _Principal] = {}
        """Of clients that wait."""
        self._total_weight = 0.0
        self._n_requests = 0
        self.n_bytes = 0
        self.is_empty = True
        """Nobody waits; an attribute, because each `generate` asks."""
        self.is_untried = False
        """Somebody waits who was not turned down by the present workers; cleared by the
        dispatcher when it has tried all."""

    def __len__(self) -> int:
        return self._n_requests

    def __iter__(self) -> Iterator[Request]:
        shares = [each for own in self._principals.values() for each in own.shares.values()]
        return iter([each for share in shares for each in share.requests.values()])

    def has_room(self, n_bytes: int) -> bool:
        """Whether one more with a body of `n_bytes` fits."""
        bounds = self._bounds
        return self._n_requests < bounds.n_requests and self.n_bytes + n_bytes <= bounds.n_bytes

    def lane(self, request: Request) -> Lane | None:
        """Where others with the same needs wait, if any do."""
        key = _lane_key(request)
        return self._lanes.get(key) if self.first(key) is not None else None

    def ran(self, request: Request, now: float) -> None:
        """A request finished; those that wait like it will hardly be faster."""
        lane = self._lanes.get(_lane_key(request))
        if lane is not None and request.sent_at:
            lane.paces.ended(request.principal, request.place.cost, now - request.sent_at)

    def add(self, request: Request, *, is_tried: bool = False) -> None:
        """Wait; a request that comes back keeps its old place in line.

        `is_tried`: it, or one before it with the same needs, was turned down just now.
        """
        self.remove(request)
        request.is_waiting = True
        if request.state == "queued":  # parked ones stand in nobody's way
            key = _lane_key(request)
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Lane(self._shares_of(request.place.policy))
            lane.add(request)
            self.is_untried |= not is_tried
        n_bytes = len(request.body)
        own = self._principals.get(request.principal)
        if own is None:
            own = self._principals[request.principal] = _Principal()
            self._total_weight += self._bounds.weight(request.principal)
        share = own.shares.get(request.client)
        if share is None:
            share = own.shares[request.client] = _Share()
            own.weight += self._bounds.weight(request.client)
        share.requests[request.rid] = request
        share.n_bytes += n_bytes
        own.n_requests += 1
        own.n_bytes += n_bytes
        self._n_requests += 1
        self.n_bytes += n_bytes
        self.is_empty = False

    def remove(self, request: Request) -> None:
        """Stop waiting, if it does."""
        if request.is_waiting:
            self._leave(request)
            self.is_untried = True  # who waited behind it may be the first now

    def _leave(self, request: Request) -> None:
        request.is_waiting = False
        if request.lane is not None:
            request.lane.discount(request)
        n_bytes = len(request.body)
        own = self._principals[request.principal]
        share = own.shares[request.client]
        del share.requests[request.rid]
        share.n_bytes -= n_bytes
        own.n_requests -= 1
        own.n_bytes -= n_bytes
        if not share.requests:
            del own.shares[request.client]
            own.weight -= self._bounds.weight(request.client)
        if not own.shares:
            del self._principals[request.principal]
            self._total_weight -= self._bounds.weight(request.principal)
        self._n_requests -= 1
        self.n_bytes -= n_bytes
        self.is_empty = not self._n_requests
        if self.is_empty:
            self._lanes.clear()  # policies and rules are named by peers

    def served(self, request: Request, now: float) -> None:
        """Its turn came, a worker has it."""
        lane = request.lane
        if lane is not None:
            lane.served(request, now)
            self._leave(request)  # the dispatcher goes on with the next of the lane

    def charge(self, request: Request, cost: int) -> None:
        """Its principal and its client pay for `cost` tokens."""
        shares = self._shares_of(request.place.policy)
        shares.charge(request.principal, request.client, cost)

    def first(self, key: LaneKey) -> Request | None:
        """Returns the next request of a lane; drops the lane when it is empty."""
        lane = self._lanes.get(key)
        request = lane.first() if lane is not None else None
        if request is None:
            self._lanes.pop(key, None)
        return request

    def ranked(self) -> list[tuple[Rank, LaneKey]]:
        """A heap of all lanes, ordered by their first requests."""
        ranked: list[tuple[Rank, LaneKey]] = []
        for key, lane in list(self._lanes.items()):
            request = self.first(key)
            if request is not None:
                ranked.append((lane.rank(request), key))
        heapq.heapify(ranked)
        return ranked

    def next_rank(self, key: LaneKey) -> Rank | None:
        """Rank of a lane now; None when it is empty."""
        request = self.first(key)
        return self._lanes[key].rank(request) if request is not None else None

    def to_displace(self, newcomer: Request) -> Request | None:
        """The request to displace for a client below its fair share: the greediest one's newest.

        First of the greediest principal; if that is the newcomer's own, or the newcomer's has its
        share, then of the greediest client of its own principal. None when the newcomer would have
        more than its own share there too, or would not fit even then.
        """
        bounds, n_bytes = self._bounds, len(newcomer.body)
        found = self._greediest_share(newcomer)
        if found is None:
            return None
        held = reversed(found.requests.values())
        newest = next((each for each in held if not each.may_run_elsewhere), None)
        if newest is None:
            return None
        fits = self.n_bytes - len(newest.body) + n_bytes <= bounds.n_bytes
        return newest if fits else None

    def _greediest_share(self, newcomer: Request) -> _Share | None:
        bounds, name, client = self._bounds, newcomer.principal, newcomer.client
        own = self._principals.get(name) or _Principal()
        added = bounds.part(1, len(newcomer.body))
        total = self._total_weight + (0.0 if own.shares else bounds.weight(name))
        wanted = added + own.filled(bounds)
        if wanted * total <= bounds.weight(name):
            greediest = _greediest(self._principals, name, wanted, bounds)
            if greediest:
                shares = self._principals[greediest].shares
                return shares[_greediest(shares, "", 0.0, bounds)]
        share = own.shares.get(client) or _Share()
        total = own.weight + (0.0 if share.requests else bounds.weight(client))
        wanted = added + share.filled(bounds)
        if wanted * total > own.filled(bounds) * bounds.weight(client):
            return None
        greediest = _greediest(own.shares, client, wanted, bounds)
        return own.shares[greediest] if greediest else None

    def _shares_of(self, policy: str) -> FairShares:
        shares = self._shares.get(policy)
        if shares is None:
            if len(self._shares) > len(self._lanes) + 100:
                self._shares.clear()  # policies are named by peers
            shares = self._shares[policy] = FairShares(self._bounds.weights)
        return shares


def _lane_key(request: Request) -> LaneKey:
    place = request.place
    return (place.policy, place.versions, request.is_suspect, request.home, place.worker)


def _greediest(
    used: Mapping[str, _Share] | Mapping[str, _Principal], name: str, wanted: float, bounds: Bounds
) -> str:
    """Name that uses most for its weight, if more than `name` would with `wanted`; else empty."""

    def use(each: str) -> float:
        return used[each].filled(bounds) / bounds.weight(each)

    greediest = max(used, key=use, default="")
    is_other = greediest not in ("", name)
    return greediest if is_other and use(greediest) > wanted / bounds.weight(name) else ""
