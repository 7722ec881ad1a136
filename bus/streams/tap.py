"""The topics of a router's tap: which event a published batch belongs to, and whose it is.

Spec: docs/protocol.md, "The tap".
"""

import struct
from typing import Literal, NamedTuple

from rolloutbus.bus.wire.errors import RemoteProtocolError

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
    """What stands in the topic of one message."""

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
