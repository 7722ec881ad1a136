"""What a journal holds: one positional struct for each kind of record.

Spec: docs/journal.md.
"""

from typing import Annotated, Literal, get_args

import msgspec

from rolloutbus.bus.streams.tap import Outcome, Stimulus, TapEvent
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import AttemptId, Natural, Rid, Sentence, Short

LostSource = Literal["tap", "stream", "memory"]
EndReason = Literal["rotated", "closed", "recovered"]

MAX_RUN_BYTES = 65 * 1024 * 1024
"""Unpacked: a run is closed after 1 MiB, but a single record may be larger."""
SALT_BYTES = 8


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    seq: Natural
    """Number within the journal."""
    at_ns: Natural
    """When the recorder had it: nanoseconds of CLOCK_BOOTTIME."""


class Head(_Record, frozen=True, array_like=True, gc=False, tag="head"):
    """Begins a segment."""

    journal: Short
    segment: Natural
    format: Natural
    salt: Annotated[bytes, msgspec.Meta(min_length=SALT_BYTES, max_length=SALT_BYTES)]
    wall_ns: Natural
    """Unix time of `at_ns`, nanoseconds."""
    host: Sentence = ""
    filter: Sentence = ""


class Tap(_Record, frozen=True, array_like=True, gc=False, tag="tap"):
    """A frame of the router's tap."""

    event: TapEvent
    n: Natural
    router_at: float
    """Seconds of the router's clock."""
    connection: Natural
    name: Short
    entries: list[Entry]


class Stream(_Record, frozen=True, array_like=True, gc=False, tag="stream"):
    """A message that a worker published."""

    topic: bytes
    entries: list[Entry]


class ToldRecord(_Record, frozen=True, array_like=True, gc=False, tag="told"):
    """A message that the router sent to the recorder itself."""

    entries: list[Entry]


class Router(_Record, frozen=True, array_like=True, gc=False, tag="router"):
    """A router's core began: the turns that follow are its own."""

    program: Short
    """Version of the program that ran."""
    settings: str
    """RouterSettings, JSON, with the seed of its choices."""
    instance: Short
    tap: Sentence = ""
    """Where it publishes what it routes; empty: nowhere."""


class TurnRecord(_Record, frozen=True, array_like=True, gc=False, tag="turn"):
    """One turn of a router's core: its input, and its outcome."""

    n: Natural
    """Number among the turns of this router, from 0."""
    stimulus: Stimulus
    outcome: Outcome


class LostRecord(_Record, frozen=True, array_like=True, gc=False, tag="lost"):
    """Something crossed the bus and is not here."""

    source: LostSource
    name: Rid
    attempt: AttemptId
    first: Natural
    count: Natural


class End(_Record, frozen=True, array_like=True, gc=False, tag="end"):
    """Closes a segment."""

    reason: EndReason
    n_records: Natural
    cut_bytes: Natural = 0


class Packed(_Record, frozen=True, array_like=True, gc=False, tag="packed"):
    """A run of records, compressed."""

    n_records: Natural
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_RUN_BYTES)]
    content: bytes


class Unknown(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record of a kind that this program does not know."""

    kind: Short
    seq: Natural
    at_ns: Natural


Record = Head | Tap | Stream | ToldRecord | Router | TurnRecord | LostRecord | End | Packed
KINDS: frozenset[str] = frozenset(str(each.__struct_config__.tag) for each in get_args(Record))

_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(Record).decode
_decode_unknown = msgspec.msgpack.Decoder(Unknown).decode
_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)


def payload_of(record: Record) -> bytes:
    """A record as MessagePack."""
    return _encoder.encode(record)


def record_in(payload: bytes) -> Record | Unknown:
    """The record that a payload is. Raises RemoteProtocolError: it breaks its type."""
    try:
        return _decode(payload)
    except _ERRORS as error:
        try:
            unknown = _decode_unknown(payload)
        except _ERRORS:
            unknown = None
        if unknown is None or unknown.kind in KINDS:
            raise RemoteProtocolError(f"no record: {str(error)[:200]}") from error
        return unknown
