"""What a router's core is told and what comes of it, as values that can be kept and compared.

Spec: docs/journal.md, "Turns".
"""

from collections.abc import Iterable
from typing import Literal

import msgspec
import xxhash

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES
from rolloutbus.bus.wire.entry import Entry

StimulusEvent = Literal[
    "received",
    "signed",
    "undelivered",
    "malformed",
    "revoked",
    "tick",
    "counted",
    "letters",
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
    """`signed`: the principal, JSON; `revoked`: the code; `counted`: the counter."""
    count: int = 0
    """`counted`: how many."""


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the core wanted."""

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
