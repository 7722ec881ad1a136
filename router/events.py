"""All events of a router's core, as one union, and the one function that takes them.

Spec: docs/journal.md, "Turns".
"""

from collections.abc import Callable

import msgspec

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.wire.entry import Entry, Peer

Effect = SendAll | ForgetPeer


class Outgoing:
    """Where every part of the router core puts what it wants sent."""

    def __init__(self) -> None:
        self._queues: dict[Peer, SendAll] = {}
        self._forgotten: list[Peer] = []

    def send(self, peer: Peer, entry: Entry) -> None:
        """Send an entry to a peer."""
        queue = self._queues.get(peer)
        if queue is None:
            self._queues[peer] = SendAll(peer, [entry])
        else:
            queue.entries.append(entry)

    def queue(self, peer: Peer) -> list[Entry]:
        """What is sent to a peer with the next `take`, to be appended to."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = SendAll(peer, [])
        return queue.entries

    def forget(self, peer: Peer) -> None:
        """Tell the shell that nothing more will be sent to this connection."""
        self._forgotten.append(peer)

    def take(self) -> list[Effect]:
        """Everything since the last call."""
        if not self._queues and not self._forgotten:
            return []
        effects: list[Effect] = [*self._queues.values()]
        self._queues = {}
        if self._forgotten:
            effects += map(ForgetPeer, self._forgotten)
            self._forgotten = []
        return effects


class Received(msgspec.Struct, frozen=True, gc=False):
    """One batch came from a connection."""

    peer: Peer
    entries: list[Entry]
    principal: Principal | None = None
    """Whose key the connection has, if it has one: what that one may not say is refused."""
    host: str = ""
    """Of a hello that came from another host: the IP address of that host. Else empty."""


class Returned(msgspec.Struct, frozen=True, gc=False):
    """These entries were not sent to a connection, which is gone or takes no more."""

    peer: Peer
    entries: list[Entry]


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """A message of a connection could not even be decoded."""

    peer: Peer


class Revoked(msgspec.Struct, frozen=True, gc=False):
    """The keys of connections have lost their rights, or (`unknown-peer`) have others."""

    peers: list[Peer]
    code: str


class Ticked(msgspec.Struct, frozen=True, gc=False):
    """Time has passed: at least every 0.25 s, after the sockets were drained."""


class Counted(msgspec.Struct, frozen=True, gc=False):
    """The shell has seen something that `status` shows."""

    counter: str
    n: int


class LettersKept(msgspec.Struct, frozen=True, gc=False):
    """The shell has taken the dead letters that there were."""


class KeysChanged(msgspec.Struct, frozen=True, gc=False):
    """This is the allow-list from now on."""

    principals: list[Principal]


Event = Received | Returned | Malformed | Revoked | Ticked | Counted | LettersKept | KeysChanged
Handle = Callable[[Event, float], list[Effect]]
"""`RouterCore.handle`, with or without listeners: (event, now in seconds) -> effects."""
