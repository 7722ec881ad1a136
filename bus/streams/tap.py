"""Records of a router: topics of the tap, and turns of its core as values to compare.

Spec: docs/protocol.md, "The tap"; docs/journal.md, "Turns".
"""

import struct
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec
import xxhash

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError

StimulusEvent = Literal[
    "received",
    "signed",
    "undelivered",
    "malformed",
    "revoked",
    "tick",
    "counted",
    "letters",
    "keys",
]
ToldEffect = tuple[bytes, list[Entry] | None]
"""(peer, what is sent there); None: the peer is forgotten."""

_encode = msgspec.msgpack.Encoder().encode


class Stimulus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event of the core."""

    event: StimulusEvent
    at: float
    """The router's clock, seconds."""
    peers: list[bytes] = []
    """Whose; of `revoked` any number, of what is nobody's none."""
    entries: list[Entry] = []
    """What came, or could not be sent."""
    text: str = ""
    """`signed`: the principal, JSON; `revoked`: the code; `counted`: the counter; `keys`:
    the principals of the allow-list, JSON."""
    count: int = 0
    """`counted`: how many."""
    host: str = ""
    """`signed`: address of the other host that a hello came from; empty: from none."""


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Effects that the core wanted."""

    effects: list[ToldEffect]
    """In order."""
    crash: str = ""
    """The exception that ended the router; empty: none."""


def outcome_of(effects: Iterable[SendAll | ForgetPeer]) -> Outcome:
    """Effects as a value; bodies that travel alone are only named, by length and digest.

    They passed through: they stand in the stimulus that brought them.
    """
    return Outcome(
        [
            (each.peer, None if isinstance(each, ForgetPeer) else [_named(e) for e in each.entries])
            for each in effects
        ]
    )


def crash_of(error: Exception) -> Outcome:
    """A bug of the core's: nothing was wanted any more."""
    return Outcome([], f"{type(error).__name__}: {error}")


def _named(entry: Entry) -> Entry:
    if len(entry.body) <= DETACH_ABOVE_BYTES:
        return entry
    name = {"size_bytes": len(entry.body), "xxh3_128": xxhash.xxh3_128_digest(bytes(entry.body))}
    return msgspec.structs.replace(entry, body=msgspec.Raw(_encode(name)))


TapEvent = Literal["received", "sent", "undelivered", "malformed", "revoked", "tick"]

_SIGNS: dict[TapEvent, bytes] = {
    "received": b">",
    "sent": b"<",
    "undelivered": b"?",
    "malformed": b"!",
    "revoked": b"x",
    "tick": b".",
}
_EVENTS: dict[bytes, TapEvent] = {sign: event for event, sign in _SIGNS.items()}
_FIXED = struct.Struct(">cQdQ")


class TapMark(NamedTuple):
    """The parts of one message's topic."""

    event: TapEvent
    n: int
    """Number of the message at this tap."""
    at: float
    """The router's clock, seconds."""
    connection: int
    """As the tap numbers them; 0: nobody's."""
    name: str
    """Of the actor at its other end; empty while it is unknown."""

    @property
    def topic(self) -> bytes:
        """On the wire."""
        fixed = _FIXED.pack(_SIGNS[self.event], self.n, self.at, self.connection)
        return fixed + self.name.encode()


def mark_in(topic: bytes) -> TapMark:
    """The mark that a topic is.

    Raises:
        RemoteProtocolError: it is none.
    """
    try:
        sign, n, at, connection = _FIXED.unpack_from(topic)
        return TapMark(_EVENTS[sign], n, at, connection, topic[_FIXED.size :].decode())
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("not a topic of a tap") from error
