"""What a shell needs of a transport: ports that carry batches of entries, and never block.

Implementations: `bus.transport.zmq_ports`, `bus.transport.zmq_topics` (sockets). Simulations have
`bus.simulation.memory_ports`, which are alike but count nothing. Every port lives on the event loop
that was running when it was made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import Peer

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
