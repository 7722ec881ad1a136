"""Detached requests: they go on without their client, which may come back for them by name.

Spec: docs/protocol.md, "Detached requests".
"""

from collections import OrderedDict
from typing import NamedTuple

from rolloutbus.bus.membership.tombstones import SettledRequests, Tombstones
from rolloutbus.bus.wire.entry import Attempt, Peer
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import DetachedRequest, DetachedState
from rolloutbus.router.members.clients import Clients
from rolloutbus.router.requests.record import Request


class _Follower(NamedTuple):
    peer: Peer
    has_prompt: bool
    """It could send the request again by itself."""


MAX_DETACHED = 10_000
"""Held at once, for all clients together; workers list theirs in every heartbeat."""
UNHEARD_S = 3600.0
"""What nobody was told is kept this long, like the endings in a worker's outbox."""
MAX_OVER = 100_000
"""Those that are over are remembered for all clients together."""
COLLECTED_S = 60.0
"""A heartbeat that left its worker before the acknowledgement came names the request once more."""

_SHOWN: dict[str, DetachedState] = {"running": "running", "ended": "ended"}


class Unheard(NamedTuple):
    """An ending that the router itself sent, to a client that may have died before it came."""

    client: str
    group: str
    kind: str
    problem: Problem | None
    """None if it was cancelled."""
    until: float


class Detached:
    """Tracks detached requests: who follows them, and which endings no client has received."""

    def __init__(self, clients: Clients, silence_s: float) -> None:
        """A client that was silent for `silence_s` may have died: it follows nothing."""
        self._clients = clients
        self._silence_s = silence_s
        self.now = 0.0
        """Of the last tick, seconds."""
        self.requests: dict[str, Request] = {}
        """By rid; all of them are in the request table too."""
        self._followers: dict[str, _Follower] = {}
        self._unheard: OrderedDict[str, Unheard] = OrderedDict()
        self._collected = Tombstones(COLLECTED_S, MAX_DETACHED)
        self.over = SettledRequests(MAX_OVER)

    @property
    def is_full(self) -> bool:
        """No more are taken."""
        return len(self.requests) >= MAX_DETACHED

    def add(self, request: Request) -> None:
        """A detached request enters the table."""
        self.requests[request.rid] = request
        self._unheard.pop(request.rid, None)

    def remove(self, request: Request) -> None:
        """It leaves the table."""
        self.requests.pop(request.rid, None)
        self._followers.pop(request.rid, None)

    def collected(self, request: Request) -> None:
        """Its client has the ending."""
        self.remove(request)
        self.acked(request.rid, request.attempt)

    def acked(self, rid: str, attempt: Attempt) -> None:
        """Its client has this ending, wherever it is kept."""
        self._collected.put(rid, attempt, self.now)

    def is_collected(self, rid: str, attempt: Attempt) -> bool:
        """Whether this ending was acknowledged just now."""
        over = self._collected.get(rid)
        return over is not None and attempt <= over

    def is_settled(self, rid: str) -> bool:
        """Whether no execution counts any more: its caller has an end of it, or it was aborted."""
        unheard = self._unheard.get(rid)
        return rid in self.over or (unheard is not None and unheard.kind == "cancelled")

    def end_for_good(self, rid: str) -> None:
        """Its client has given its caller an end of it."""
        self.over.add(rid, self.now)
        self._unheard.pop(rid, None)

    def follow(self, rid: str, peer: Peer, *, has_prompt: bool) -> None:
        """The request was sent, or attached to, over this connection."""
        if rid not in self.requests:
            return
        known = self._followers.get(rid)
        if known is not None and known.peer == peer:
            has_prompt = has_prompt or known.has_prompt
        self._followers[rid] = _Follower(peer, has_prompt)

    def is_followed(self, request: Request) -> bool:
        """Whether its client waits for its ending."""
        follower = self._followers.get(request.rid)
        client = self._clients.named(request.client)
        if follower is None or client is None or client.seen_at < self.now - self._silence_s:
            return False
        return follower.peer == client.peer

    def can_resend(self, request: Request) -> bool:
        """Whether its client waits for it, and could send it again."""
        return self.is_followed(request) and self._followers[request.rid].has_prompt

    def unheard(self, rid: str, client: str) -> Unheard | None:
        """What this client may not have heard of its request."""
        found = self._unheard.get(rid)
        return found if found is not None and found.client == client else None

    def keep_unheard(self, request: Request, kind: str, problem: Problem | None) -> None:
        """The request has ended here."""
        until = self.now + UNHEARD_S
        self._unheard[request.rid] = Unheard(
            request.client, request.place.group, kind, problem, until
        )
        if len(self._unheard) > MAX_DETACHED:
            self._unheard.popitem(last=False)

    def listed(self, client: str) -> list[DetachedRequest]:
        """All that is known for a client's name."""
        found = [
            DetachedRequest(
                each.rid, _SHOWN.get(each.state, "waiting"), each.place.group, each.worker
            )
            for each in self.requests.values()
            if each.client == client
        ]
        unheard = self._unheard.items()
        return found + [
            DetachedRequest(rid, "ended", each.group)
            for rid, each in unheard
            if each.client == client
        ]

    def tick(self, now: float) -> int:
        """Time passes; returns how many endings grew too old to be kept."""
        self.now = now
        self._collected.expire(now)
        self.over.expire(now)
        n_dropped = 0
        while self._unheard and next(iter(self._unheard.values())).until <= now:
            self._unheard.popitem(last=False)
            n_dropped += 1
        return n_dropped
