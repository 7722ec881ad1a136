"""Entries, bodies and arrays to bytes and back: the only caller of MessagePack on the bus.

Spec: docs/protocol.md, "Frames", "Arrays".
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Raw

from rolloutbus.bus.wire.commands import KINDS, RESULTS
from rolloutbus.bus.wire.entry import Entry, TracedEntry
from rolloutbus.bus.wire.errors import LocalProtocolError, RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_BATCH_ENTRIES, MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.control import FleetOutcome
from rolloutbus.bus.wire.messages.generation import Array, ArrayDtype

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
Item = TypeVar("Item")

PROTOCOL_VERSION = 1
"""Of frames, and the lowest that is spoken."""
TRACED_VERSION = 2
"""In this one an entry may have a tenth element, its trace; frames are those of version 1."""
HANDED_KEYS_VERSION = 3
"""In this one a router hands the allow-list to members; frames are those of version 1."""
SPOKEN = (PROTOCOL_VERSION, HANDED_KEYS_VERSION)
"""Lowest and highest version, as a hello says them."""
SIGNATURE = b"RB" + bytes([PROTOCOL_VERSION])
DETACH_ABOVE_BYTES = 16 * 1024
"""Larger bodies travel in a frame of their own, uncopied by the router."""
MAX_BATCH_BYTES = 4 * 1024 * 1024
MAX_COMPLAINT_CHARS = 240

MAX_ARRAY_ITEMS = 1 << 20
"""Of an array of numpy's that stands where a list belongs."""


def _plain(value: object) -> object:
    """A plain value for one that MessagePack does not know, such as numbers of numpy.

    Raises:
        TypeError: nothing does.
    """
    match value:
        case np.bool():
            return bool(value)
        case np.integer() | np.floating() | np.str_() | np.bytes_():
            plain = value.item()
            return float(plain) if isinstance(plain, np.floating) else plain  # a longdouble's
        case np.ndarray() if value.dtype.kind in "biuf" and value.size <= MAX_ARRAY_ITEMS:
            return value.tolist()
        case str():
            return str.__str__(value)
        case bytes():
            return bytes.__getitem__(value, slice(None))
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case _:
            pass
    raise TypeError(f"MessagePack has no form for {type(value).__name__}")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_any_batch = msgspec.msgpack.Decoder(list[Entry]).decode
_wire_batch = msgspec.msgpack.Decoder(
    Annotated[list[Entry], msgspec.Meta(max_length=MAX_BATCH_ENTRIES)]
).decode
_any_traced = msgspec.msgpack.Decoder(list[TracedEntry]).decode
_wire_traced = msgspec.msgpack.Decoder(
    Annotated[list[TracedEntry], msgspec.Meta(max_length=MAX_BATCH_ENTRIES)]
).decode
_body_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in KINDS.items()}
_result_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in RESULTS.items()}

_fleet_decoder = msgspec.msgpack.Decoder(FleetOutcome)

COMPLAINTS = (msgspec.DecodeError, ValueError, RecursionError)
"""What a decoder raises."""


def encode_batch(entries: Sequence[Entry]) -> bytes:
    """One batch frame: signature, protocol version, MessagePack list of entries."""
    return SIGNATURE + _encode(entries)


def decode_batch(frame: bytes | memoryview, *, is_trusted: bool = False) -> list[Entry]:
    """Entries of a batch frame.

    Args:
        frame: as received.
        is_trusted: it comes from our own process or child, which need not cut its batches.

    Raises:
        RemoteProtocolError: not our protocol, not our version, too large, or not well formed.
    """
    if frame[:3] != SIGNATURE:
        if bytes(frame[:2]) == SIGNATURE[:2]:
            msg = f"protocol version {bytes(frame[2:3])!r} is not spoken here"
            raise RemoteProtocolError(msg)
        msg = "frame does not begin with the bus signature"
        raise RemoteProtocolError(msg)
    if is_trusted:
        decode, decode_traced = _any_batch, _any_traced
    elif len(frame) > MAX_BATCH_BYTES:
        msg = f"a batch of {len(frame)} bytes; at most {MAX_BATCH_BYTES} are allowed"
        raise RemoteProtocolError(msg)
    else:
        decode, decode_traced = _wire_batch, _wire_traced
    entries = memoryview(frame)[3:]
    try:
        return decode(entries)
    except COMPLAINTS:  # one of its entries has a trace, or the frame is malformed
        pass
    try:
        return list[Entry](decode_traced(entries))
    except COMPLAINTS as error:
        raise RemoteProtocolError(f"malformed batch: {complaint(error)}") from error


def frames_of(entries: list[Entry]) -> list[list[Entry]]:
    """Cut into frames: at most MAX_BATCH_ENTRIES and MAX_BATCH_BYTES, large bodies alone."""
    if len(entries) <= MAX_BATCH_ENTRIES:
        for entry in entries:  # twice as fast as any()
            if len(entry.body) > DETACH_ABOVE_BYTES:
                break
        else:
            return [entries]
    batches: list[list[Entry]] = [[]]
    size_bytes = 0
    for entry in entries:
        is_large = len(entry.body) > DETACH_ABOVE_BYTES
        is_full = len(batches[-1]) >= MAX_BATCH_ENTRIES or size_bytes > MAX_BATCH_BYTES // 2
        if batches[-1] and (is_large or is_full):
            batches.append([])
            size_bytes = 0
        batches[-1].append(entry)
        size_bytes += len(entry.body)
        if is_large:
            batches.append([])
            size_bytes = 0
    return batches if batches[-1] else batches[:-1]


def runs_within(
    max_bytes: int, items: Iterable[Item], bytes_of: Callable[[Item], int]
) -> list[list[Item]]:
    """Runs in order, of at most `max_bytes` each; an item that has more is alone in its run."""
    runs: list[list[Item]] = []
    left = 0
    for item in items:
        size_bytes = bytes_of(item)
        if not runs or size_bytes > left:
            runs.append([])
            left = max_bytes
        runs[-1].append(item)
        left -= size_bytes
    return runs


def pack(body: msgspec.Struct) -> Raw:
    """A body as bytes, to be put into an entry."""
    return Raw(_encode(body))


def unpack(entry: Entry) -> msgspec.Struct:
    """The typed body of an entry.

    Raises:
        RemoteProtocolError: unknown kind, or the body breaks its type; the message names the field.
    """
    decoder = _body_decoders.get(entry.kind)
    if decoder is None:
        msg = f"unknown message kind {entry.kind[:32]!r}"
        raise RemoteProtocolError(msg)
    try:  # as in `_decode`: this is called for nearly every entry
        return decoder.decode(entry.body)
    except COMPLAINTS as error:
        raise RemoteProtocolError(f"{entry.kind[:32]}: {complaint(error)}") from error


def unpack_as(body: type[BodyT], entry: Entry) -> BodyT:
    """Decode the body of an entry, which must have this type.

    Raises:
        RemoteProtocolError: the body breaks its type; the message names the field.
        LocalProtocolError: its kind has another type.
    """
    found = unpack(entry)
    if not isinstance(found, body):
        msg = f"a {entry.kind!r} holds a {type(found).__name__}, not a {body.__name__}"
        raise LocalProtocolError(msg)
    return found


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
    except COMPLAINTS as error:
        raise RemoteProtocolError(f"{entry.kind[:32]}: {complaint(error)}") from error


def _decode(decoder: "msgspec.msgpack.Decoder[msgspec.Struct]", entry: Entry) -> msgspec.Struct:
    try:
        return decoder.decode(entry.body)
    except COMPLAINTS as error:
        raise RemoteProtocolError(f"{entry.kind[:32]}: {complaint(error)}") from error


def complaint(error: Exception) -> str:
    """A decoder's complaint, cut: it quotes names that the peer made up, of any length.

    The end is kept, because the field stands there.
    """
    text = str(error)
    if len(text) <= MAX_COMPLAINT_CHARS:
        return text
    half = MAX_COMPLAINT_CHARS // 2
    return f"{text[:half]} … {text[-half:]}"


def topic_of(client: str) -> bytes:
    """Stream topic of a client: fixed width, so no topic is a prefix of another. 16 bytes."""
    return xxhash.xxh3_128_digest(client.encode())


AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]

_DTYPES: dict[str, str] = {
    "int32": "<i4",
    "int64": "<i8",
    "float32": "<f4",
    "float16": "<f2",
    "uint8": "|u1",
    "bfloat16": "<u2",
}
"""Ours -> numpy's type of the same size."""


def array_of(values: AnyArray, dtype: ArrayDtype | None = None) -> Array:
    """An array for the wire.

    Args:
        values: [shape], any layout.
        dtype: `bfloat16` if `values` is uint16, the bits of such; else that of `values`.

    Raises:
        ValueError: the wire has no such type, or it is larger than 16 MiB.
    """
    name = dtype or values.dtype.name
    if name not in _DTYPES or np.dtype(_DTYPES[name]).itemsize != values.dtype.itemsize:
        raise ValueError(f"the bus has no arrays of {name} made of {values.dtype.name}")
    if values.nbytes > MAX_PIECE_BYTES:
        raise ValueError(f"an array of {values.nbytes} bytes; at most {MAX_PIECE_BYTES} are sent")
    known: ArrayDtype = name  # type: ignore[assignment] - a key of _DTYPES
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    return Array(known, values.shape, data)


def numpy_of(array: Array) -> AnyArray:
    """The array for numpy, [shape], read-only; bfloat16 as float32, which is exact.

    Raises:
        RemoteProtocolError: its bytes do not fill its shape.
    """
    dtype = np.dtype(_DTYPES[array.dtype])
    if min(array.shape, default=0) < 0 or prod(array.shape) * dtype.itemsize != len(array.data):
        size = len(array.data)
        raise RemoteProtocolError(f"an array {array.dtype} {array.shape} of {size} bytes")
    values = np.frombuffer(array.data, dtype).reshape(array.shape)
    if array.dtype == "bfloat16":
        wide = (values.astype(np.uint32) << 16).view(np.float32)
        wide.flags.writeable = False
        return wide
    return values
