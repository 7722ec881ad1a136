"""A shell's view of a transport: ports that carry batches of entries and never block.

Every port lives on the event loop that was running when it was made. With ZeroMQ:
`bus.transport.zmq_ports`, `bus.transport.zmq_topics`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from rolloutbus.bus.wire.entry import Entry, Peer

LinkFailure = Literal["no-answer", "other-key", "unknown-key", "wrong-role"]
"""Why a connection did not come to be: nobody listens or answers; somebody does, without proof of
the key that is expected; ours is in no allow-list; it is, but its role has no place there."""

ANNOUNCE_AGAIN_S = 10.0
EVERYBODY = ""
"""Among the clients of a subscription: the rows of all. No client has this name."""


class Patience:
    """Decides when to say that a router is waited for, and what."""

    def __init__(self, address: str, role: str) -> None:
        """`role`: what the key must be for, such as `a worker`."""
        self._address = address
        self._role = role
        self._announced = ""
        self._announce_at = 0.0

    def failed(self, why: LinkFailure, now: float) -> str:
        """A connection has failed; returns a sentence if it is time for one, else nothing."""
        sentence = sentence_of(why, self._address, self._role)
        if sentence == self._announced and now < self._announce_at:
            return ""
        self._announced, self._announce_at = sentence, now + ANNOUNCE_AGAIN_S
        return f"{sentence}; trying again"

    def joined(self) -> None:
        """The router has answered: nothing is waited for."""
        self._announced = ""


def sentence_of(why: LinkFailure, address: str, role: str) -> str:
    """A failure as a sentence; `role` is what the key must be for, such as `a client`."""
    where = address.partition("#")[0]
    match why:
        case "no-answer":
            return f"no router answers at {where}"
        case "other-key":
            return f"what answers at {where} does not hold the router's key that was given"
        case "unknown-key":
            return f"the router at {where} does not know this key: let it in with `rolloutbus keys`"
        case "wrong-role":
            return f"this key is not {role}'s: the router at {where} knows it in another role"


LAST_WORDS_MS = 1000
"""What a link that its owner leaves has to get its last entries out; then they are dropped."""


@dataclass(slots=True)
class PortCounters:
    """What a port has carried and dropped since it was made."""

    frames_in: int = 0
    entries_in: int = 0
    frames_out: int = 0
    entries_out: int = 0
    dropped_out: int = 0
    """Entries that could not be handed over: peer gone or its queue full."""
    malformed_in: int = 0
    """Messages that broke the protocol and were dropped."""
    foreign_in: int = 0
    """Messages dropped for their key: revoked, or not the one that this connection began with."""
    streak_in: int = 0
    """Messages that a subscription read since none waited. A publisher drops what it has no room
    for, and tells nobody; as long as this stays below what the socket holds, it dropped nothing."""
    broken: int = 0
    """Connections of a subscription that ended; it makes new ones, but misses what is published
    meanwhile."""
    turned_away: int = 0
    """Connections that were cut off at once because descriptors are scarce."""


BatchHandler = Callable[[list[Entry]], None]
PeerBatchHandler = Callable[[Peer, list[Entry]], None]
TopicBatchHandler = Callable[[bytes, list[Entry]], None]
DownHandler = Callable[[], None]


class LinkPort(Protocol):
    """One end of a link between two actors."""

    counters: PortCounters

    def send(self, entry: Entry) -> None:
        """Queue for the end of this loop tick; lost if the link goes down."""
        ...

    def close(self, *, linger_ms: int = 0) -> None:
        """Drop the link; what is queued has `linger_ms` milliseconds left to get out."""
        ...


class SubscriptionPort(Protocol):
    """A subscriber to any number of publishers."""

    counters: PortCounters

    def connect(self, endpoint: str) -> None:
        """Listen to one more publisher."""
        ...

    def disconnect(self, endpoint: str) -> None:
        """Stop listening to a publisher; unknown ones are ignored."""
        ...

    def close(self) -> None:
        """Drop all subscriptions."""
        ...
