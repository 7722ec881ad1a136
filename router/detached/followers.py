"""Over which connection each detached request is followed, and whether somebody is there.

Spec: docs/protocol.md, "Detached requests".
"""

from typing import NamedTuple

from rolloutbus.bus.wire.ids import Peer
from rolloutbus.router.members.clients import Clients
from rolloutbus.router.requests.record import Request


class _Follower(NamedTuple):
    peer: Peer
    has_prompt: bool
    """It could send the request again by itself."""


class Followers:
    """Who waits for detached requests; a client that fell silent may have died."""

    def __init__(self, clients: Clients, silence_s: float) -> None:
        self._clients = clients
        self._silence_s = silence_s
        self._by_rid: dict[str, _Follower] = {}
        self.now = 0.0
        """Of the last tick, seconds."""

    def follow(self, rid: str, peer: Peer, *, has_prompt: bool) -> None:
        """The request was sent, or attached to, over this connection."""
        known = self._by_rid.get(rid)
        if known is not None and known.peer == peer:
            has_prompt = has_prompt or known.has_prompt
        self._by_rid[rid] = _Follower(peer, has_prompt)

    def forget(self, rid: str) -> None:
        """The request left the table."""
        self._by_rid.pop(rid, None)

    def is_followed(self, request: Request) -> bool:
        """Whether its client waits for its ending."""
        follower = self._by_rid.get(request.rid)
        return follower is not None and follower.peer == self._listener(request)

    def can_resend(self, request: Request) -> bool:
        """Whether its client waits for it, and could send it again."""
        return self.is_followed(request) and self._by_rid[request.rid].has_prompt

    def _listener(self, request: Request) -> Peer | None:
        client = self._clients.named(request.client)
        heard_after = self.now - self._silence_s
        return client.peer if client is not None and client.seen_at >= heard_after else None
