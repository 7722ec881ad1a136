"""The router's queue: bounded, by priority, then fair between clients.

Requests with the same policy and version rule wait in one lane, so a lane whose weights nobody
has yet never stands in the way of the others.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from router.lane import Lane, Rank
from router.requests import Request
from router.turns import Turns

LaneKey = tuple[str, str, bool, str]
"""(policy, version rule, whether it runs alone, worker that it waits for if it is a session's
turn)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait."""

    n_requests: int
    n_bytes: int
    """Of bodies, all together."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Shares of clients that do not have 1.0."""


@dataclass(slots=True)
class _Share:
    """What one client has in the room."""

    requests: dict[str, Request] = field(default_factory=dict[str, Request])
    """By rid, the longest waiting first."""
    n_bytes: int = 0


class WaitingRoom:
    """Queued requests; removal is lazy, a request that left `queued` is skipped."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lanes: dict[LaneKey, Lane] = {}
        self._turns: dict[str, Turns] = {}
        """Per policy."""
        self._shares: dict[str, _Share] = {}
        """Of clients that wait."""
        self._total_weight = 0.0
        """Of those clients."""
        self._n_requests = 0
        self.n_bytes = 0
        self.is_empty = True
        """Nobody waits; an attribute, because each `generate` asks."""

    def __len__(self) -> int:
        return self._n_requests

    def __iter__(self) -> Iterator[Request]:
        return iter([each for own in self._shares.values() for each in own.requests.values()])

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
            lane.pace.ended(request.place.cost, now - request.sent_at)

    def add(self, request: Request) -> None:
        """Wait; a request that comes back keeps its old place in line."""
        self.remove(request)
        request.is_waiting = True
        if request.state == "queued":  # parked ones stand in nobody's way
            key = _lane_key(request)
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Lane(self._turns_of(request.place.policy))
            lane.add(request)
        share = self._shares.get(request.client)
        if share is None:
            share = self._shares[request.client] = _Share()
            self._total_weight += self._weight(request.client)
        share.requests[request.rid] = request
        share.n_bytes += len(request.body)
        self._n_requests += 1
        self.n_bytes += len(request.body)
        self.is_empty = False

    def remove(self, request: Request) -> None:
        """Stop waiting, if it does."""
        if not request.is_waiting:
            return
        request.is_waiting = False
        if request.lane is not None:
            request.lane.discount(request)
        n_bytes = len(request.body)
        share = self._shares[request.client]
        del share.requests[request.rid]
        share.n_bytes -= n_bytes
        if not share.requests:
            del self._shares[request.client]
            self._total_weight -= self._weight(request.client)
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
            self.remove(request)

    def overtaken_by(self, request: Request) -> None:
        """It went before all who wait: its client pays for that like for any other turn."""
        self._turns_of(request.place.policy).charge(request.client, request.place.cost)

    def first(self, key: LaneKey) -> Request | None:
        """Who is next in a lane; drops the lane when it is empty."""
        lane = self._lanes.get(key)
        request = lane.first() if lane is not None else None
        if request is None:
            self._lanes.pop(key, None)
        return request

    def ranked(self) -> list[tuple[Rank, LaneKey]]:
        """A heap of all lanes by whose first request is next."""
        ranked: list[tuple[Rank, LaneKey]] = []
        for key, lane in list(self._lanes.items()):
            request = self.first(key)
            if request is not None:
                ranked.append((lane.rank(request), key))
        heapq.heapify(ranked)
        return ranked

    def next_rank(self, key: LaneKey) -> Rank | None:
        """Where a lane stands now; None when nobody waits in it."""
        request = self.first(key)
        return self._lanes[key].rank(request) if request is not None else None

    def to_displace(self, client: str, n_bytes: int) -> Request | None:
        """Who makes room for a client below its fair share: the newest of the greediest client.

        None when the newcomer would have more than its own share, or would not fit even then.
        """
        own = self._shares.get(client)
        weight = self._weight(client)
        total = self._total_weight + (0.0 if own is not None else weight)
        wanted = self._part(1, n_bytes) + (self._filled(own) if own is not None else 0.0)
        if wanted * total > weight:
            return None
        greediest = max(self._shares, key=self._use, default=client)
        if greediest == client or self._use(greediest) <= wanted / weight:
            return None
        held = reversed(self._shares[greediest].requests.values())
        # A parked one may be running somewhere: it cannot be told that nothing was started.
        newest = next((each for each in held if each.state == "queued"), None)
        if newest is None:
            return None
        fits = self.n_bytes - len(newest.body) + n_bytes <= self._bounds.n_bytes
        return newest if fits else None

    def _use(self, client: str) -> float:
        """Part of the room that a waiting client fills, by its weight."""
        return self._filled(self._shares[client]) / self._weight(client)

    def _filled(self, share: _Share) -> float:
        return self._part(len(share.requests), share.n_bytes)

    def _part(self, n_requests: int, n_bytes: int) -> float:
        bounds = self._bounds
        return max(n_requests / bounds.n_requests, n_bytes / bounds.n_bytes)

    def _weight(self, client: str) -> float:
        return self._bounds.weights.get(client, 1.0)

    def _turns_of(self, policy: str) -> Turns:
        turns = self._turns.get(policy)
        if turns is None:
            if len(self._turns) > len(self._lanes) + 100:
                self._turns.clear()  # policies are named by peers
            turns = self._turns[policy] = Turns(self._bounds.weights)
        return turns


def _lane_key(request: Request) -> LaneKey:
    return (request.place.policy, request.place.versions, request.is_suspect, request.home)
