"""Entries and bodies to bytes and back: the only caller of MessagePack on the bus.

Spec: docs/protocol.md, "Frames".
"""

from collections.abc import Sequence

import msgspec
import xxhash

from bus.entry import Entry
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.messages import KINDS, RESULTS
from bus.messages.control import FleetOutcome

PROTOCOL_VERSION = 1
SIGNATURE = b"RB" + bytes([PROTOCOL_VERSION])
DETACH_ABOVE_BYTES = 16 * 1024
"""Larger bodies travel in a frame of their own, uncopied by the router."""
MAX_BATCH_BYTES = 4 * 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
"""A detached body at most this large is read; larger ones end the connection."""

_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(list[Entry])
_body_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in KINDS.items()}
_result_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in RESULTS.items()}

_fleet_decoder = msgspec.msgpack.Decoder(FleetOutcome)

_DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)


def encode_batch(entries: Sequence[Entry]) -> bytes:
    """One batch frame: signature, protocol version, MessagePack list of entries."""
    return SIGNATURE + _encoder.encode(entries)


def decode_batch(frame: bytes | memoryview) -> list[Entry]:
    """Entries of a batch frame.

    Raises:
        RemoteProtocolError: not our protocol, not our version, or not well formed.
    """
    if frame[:3] != SIGNATURE:
        if bytes(frame[:2]) == SIGNATURE[:2]:
            msg = f"protocol version {bytes(frame[2:3])!r} is not spoken here"
            raise RemoteProtocolError(msg)
        msg = "frame does not begin with the bus signature"
        raise RemoteProtocolError(msg)
    try:
        return _batch_decoder.decode(memoryview(frame)[3:])
    except _DECODE_ERRORS as error:
        msg = f"malformed batch: {error}"
        raise RemoteProtocolError(msg) from error


def pack(body: msgspec.Struct) -> msgspec.Raw:
    """A body as bytes, to be put into an entry."""
    return msgspec.Raw(_encoder.encode(body))


def unpack(entry: Entry) -> msgspec.Struct:
    """The typed body of an entry.

    Raises:
        RemoteProtocolError: unknown kind, or the body breaks its type; the message names the field.
    """
    decoder = _body_decoders.get(entry.kind)
    if decoder is None:
        msg = f"unknown message kind {entry.kind[:32]!r}"
        raise RemoteProtocolError(msg)
    return _decode(decoder, entry)


def unpack_result(command: str, entry: Entry) -> msgspec.Struct:
    """The typed body of a `finished` or `cancelled` that ends `command`.

    Raises:
        RemoteProtocolError: the body breaks its type.
    """
    decoder = _result_decoders.get(command)
    if decoder is None:
        msg = f"{command!r} is not a command"
        raise LocalProtocolError(msg)
    return _decode(decoder, entry)


def unpack_fleet(entry: Entry) -> FleetOutcome:
    """The body of a `finished` that ends a command sent to members through the router.

    Raises:
        RemoteProtocolError: the body breaks its type.
    """
    try:
        return _fleet_decoder.decode(entry.body)
    except _DECODE_ERRORS as error:
        msg = f"{entry.kind}: {error}"
        raise RemoteProtocolError(msg) from error


def _decode(decoder: "msgspec.msgpack.Decoder[msgspec.Struct]", entry: Entry) -> msgspec.Struct:
    try:
        return decoder.decode(entry.body)
    except _DECODE_ERRORS as error:
        msg = f"{entry.kind}: {error}"
        raise RemoteProtocolError(msg) from error


def topic_of(client: str) -> bytes:
    """Stream topic of a client: fixed width, so no topic is a prefix of another. 16 bytes."""
    return xxhash.xxh3_128_digest(client.encode())
