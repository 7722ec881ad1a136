"""A shell's view of a transport: ports that carry batches of entries and never block.

Every port lives on the event loop that was running when it was made. With ZeroMQ:
`bus.transport.zmq_ports`, `bus.transport.zmq_topics`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rolloutbus.bus.transport.endpoints import without_keys
from rolloutbus.bus.wire.entry import Entry, Peer

LinkFailure = Literal["no-answer", "no-key", "other-key", "unknown-key", "wrong-role", "standby"]
"""Why a connection did not come to be: nobody listens or answers; somebody does, and breaks off
since we have shown no key; somebody does, without proof of the key that is expected; ours is in no
allow-list; it is, but its role has no place there; the router there stands by for another one."""

ANNOUNCE_AGAIN_S = 10.0
EVERYBODY = ""
"""Among the clients of a subscription: the rows of all. No client has this name."""


KEY_TROUBLES = frozenset({"no-key", "other-key", "unknown-key", "wrong-role"})
"""Failures that only people mend; a router that does not answer may come by itself."""
KEY_PATIENCE_S = 600.0


class Patience:
    """Decides when to say that a router is waited for, what, and when to wait no more."""

    def __init__(
        self, routers: Sequence[str], role: str, key_patience_s: float = KEY_PATIENCE_S
    ) -> None:
        """Begin with nothing said.

        Args:
            routers: addresses, in the order in which they are tried.
            role: what the key must be for, such as `a worker`.
            key_patience_s: people get so long to mend what is wrong with the keys of a process
                that has never joined.
        """
        self._routers = routers
        self._role = role
        self._key_patience_s = key_patience_s
        self._refused_at: float | None = None
        """When the keys were found wrong first."""
        self.given_up = ""
        """The reason, as a sentence, not to try again; empty: go on."""
        self._quiet_until: dict[str, float] = {}
        """Sentence that was said -> when it may be said again."""
        self._joined = ""
        """Address of the router that answered last; empty before the first."""

    def failed(self, why: LinkFailure, address: str, now: float) -> str:
        """A connection has failed; returns a sentence if it is time for one, else nothing."""
        sentence = sentence_of(why, address, self._role)
        if why in KEY_TROUBLES and not self._joined:
            self._refused_at = now if self._refused_at is None else self._refused_at
            if now - self._refused_at >= self._key_patience_s:
                self.given_up = f"{sentence}; given up after {self._key_patience_s:g} s"
        if now < self._quiet_until.get(sentence, now):
            return ""
        self._quiet_until[sentence] = now + ANNOUNCE_AGAIN_S
        if len(self._routers) == 1:
            return f"{sentence}; trying again"
        turn = self._routers.index(address) + 1
        return f"{sentence}; trying {without_keys(self._routers[turn % len(self._routers)])}"

    def joined(self, address: str) -> str:
        """The router there has answered; returns a sentence if another one did before."""
        self._quiet_until.clear()
        before, self._joined = self._joined, address
        return moved(before, address) if before not in ("", address) else ""


def moved(before: str, after: str) -> str:
    """Another router is obeyed than before, as a sentence."""
    return f"the router is at {without_keys(after)} now; before it was at {without_keys(before)}"


def sentence_of(why: LinkFailure, address: str, role: str) -> str:
    """A failure as a sentence; `role` is what the key must be for, such as `a client`."""
    where = without_keys(address)
    match why:
        case "no-answer":
            return f"no router answers at {where}"
        case "no-key":
            return (
                f"what answers at {where} breaks off a connection without keys: to a router that "
                f"asks for them give your key (`--key FILE`, in a program `key_file=`) and its own "
                f"behind its address ({where}#KEY), as router.pub has it"
            )
        case "other-key":
            return (
                f"what answers at {where} does not hold the router's key that was given: if the "
                "router has another one now, bring its router.pub here"
            )
        case "unknown-key":
            return (
                f"the router at {where} does not know this key: it was revoked or never let in; "
                "let it in on the router's host with `rolloutbus keys allow`"
            )
        case "wrong-role":
            return f"this key is not {role}'s: the router at {where} knows it in another role"
        case "standby":
            return f"the router at {where} stands by for another one"


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
