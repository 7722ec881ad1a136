"""Lossless deltas between two versions of the same tensors: encoding and applying.

An optimiser step with a small learning rate moves few elements of a bfloat16 weight, and the high
bytes of hardly any of a float32 one; XOR against the old bytes turns both into zeros, which
compress. Spec: docs/protocol.md, "Deltas".
"""

# pyright: reportUnknownMemberType=false
# The stubs of zstandard leave a parameter of `readinto` untyped.

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from rolloutbus.bus.weights.manifest import DTYPES, Bytes, bytes_of, total_bytes
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import DeltaPart, Tensor

LEVEL = 1
"""Higher levels of zstd win a few per cent and cost several times the time."""
MAX_WINDOW_BYTES = 8 * 1024 * 1024
"""Memory that a foreign frame may ask for."""
SPARSE_SHARE = 8
"""A tensor of which at most one element in so many changed is sent by positions: up to there that
is both smaller and faster than its XOR."""
_BLOCK_BYTES = 1024 * 1024
"""Compared, combined and compressed at a time: a piece that stays in the cache."""
_COUNT_BYTES = 4

_Elements = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]
_ELEMENTS: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


class EncodedDelta(NamedTuple):
    """Parts and the bytes that they lie in."""

    parts: list[DeltaPart]
    content: Bytes
    """uint8 [of all parts]."""


def encode(
    base: Bytes, base_tensors: Sequence[Tensor], new: Bytes, tensors: Sequence[Tensor]
) -> EncodedDelta | None:
    """The delta from `base` to `new`; None if it would have no fewer bytes than `new`.

    Both hold sealed versions; tensors of equal digests are taken to be equal.
    """
    if not _are_alike(base_tensors, tensors):
        return None
    limit_bytes = total_bytes(tensors)
    zstd = zstandard.ZstdCompressor(level=LEVEL)
    parts: list[DeltaPart] = []
    content = bytearray()
    for index, (old, tensor) in enumerate(zip(base_tensors, tensors, strict=True)):
        if old.digest == tensor.digest:
            continue
        before, after = bytes_of(base, old), bytes_of(new, tensor)
        encoding, piece = _smallest(zstd, before, after, DTYPES[tensor.dtype].size_bytes)
        if len(content) + len(piece) >= limit_bytes:
            return None
        parts.append(DeltaPart(index, encoding, len(content), len(piece)))
        content += piece
    return EncodedDelta(parts, np.frombuffer(content, np.uint8))


def check_parts(parts: Sequence[DeltaPart], size_bytes: int, tensors: Sequence[Tensor]) -> None:
    """Judge a delta before a byte is allocated for it.

    Raises:
        RemoteProtocolError: it cannot be one of these tensors.
    """
    if size_bytes >= total_bytes(tensors):
        raise RemoteProtocolError(f"a delta of {size_bytes} bytes is no smaller than its version")
    last, end = -1, 0
    for part in parts:
        if not last < part.tensor < len(tensors):
            raise RemoteProtocolError(f"a delta has tensor {part.tensor} after tensor {last}")
        if part.encoding not in _APPLY:
            raise RemoteProtocolError(f"{part.encoding[:16]!r} is no encoding of a delta")
        if part.offset < end or part.offset + part.size_bytes > size_bytes:
            raise RemoteProtocolError(f"the part of tensor {part.tensor} is out of place")
        last, end = part.tensor, part.offset + part.size_bytes


def apply(
    content: Bytes, tensors: Sequence[Tensor], parts: Sequence[DeltaPart], delta: Bytes
) -> None:
    """Turn the base's bytes in `content` into the new version's; its digests are not verified.

    Raises:
        RemoteProtocolError: the delta is malformed; `content` is of no use any more.
    """
    check_parts(parts, len(delta), tensors)
    for part in parts:
        tensor = tensors[part.tensor]
        piece = delta[part.offset : part.offset + part.size_bytes]
        try:
            _APPLY[part.encoding](bytes_of(content, tensor), piece, DTYPES[tensor.dtype].size_bytes)
        except zstandard.ZstdError as error:
            message = f"the delta of tensor {tensor.name!r} cannot be read: {error}"
            raise RemoteProtocolError(message) from error


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return [(t.name, t.dtype, t.shape) for t in some] == [
        (t.name, t.dtype, t.shape) for t in others
    ]


def _smallest(
    zstd: zstandard.ZstdCompressor, base: Bytes, new: Bytes, item_bytes: int
) -> tuple[str, bytes | memoryview]:
    changed = _changed_elements(base, new, item_bytes)
    if changed is not None:
        before, after = _items(base, item_bytes), _items(new, item_bytes)
        encoding, piece = "sparse", zstd.compress(_sparse(before, after, changed))
    else:
        encoding, piece = "xor", _xor(zstd, base, new)
    return (encoding, piece) if len(piece) < len(new) else ("full", new.data)


def _changed_elements(
    base: Bytes, new: Bytes, item_bytes: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """Indices, ascending; None if they are many or do not fit in 32 bits."""
    old_items, new_items = _items(base, item_bytes), _items(new, item_bytes)
    if len(new_items) > np.iinfo(np.uint32).max:
        return None
    left = len(new_items) // SPARSE_SHARE
    found = [np.zeros(0, np.int64)]
    for start, end in _blocks(len(new_items), item_bytes):
        (places,) = np.nonzero(old_items[start:end] != new_items[start:end])
        left -= len(places)
        if left < 0:
            return None
        found.append(places + start)
    return np.concatenate(found)


def _sparse(
    base: _Elements, new: _Elements, changed: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> bytes:
    gaps = np.diff(changed, prepend=0).astype(np.uint32)
    values = base[changed] ^ new[changed]
    count = len(changed).to_bytes(_COUNT_BYTES, "little")
    return b"".join((count, gaps.tobytes(), values.tobytes()))


def _xor(zstd: zstandard.ZstdCompressor, base: Bytes, new: Bytes) -> bytes:
    """Its length is at least that of `new` if it would not be worth it."""
    frame = zstd.compressobj(size=len(new))
    scratch = np.empty(min(_BLOCK_BYTES, len(new)), np.uint8)
    content = bytearray()
    for start, end in _blocks(len(new), 1):
        block = scratch[: end - start]
        np.bitwise_xor(base[start:end], new[start:end], out=block)
        content += frame.compress(block.data)
        if len(content) >= len(new):
            return bytes(content)
    return bytes(content + frame.flush())


def _apply_full(place: Bytes, piece: Bytes, _: int) -> None:
    if len(piece) != len(place):
        raise RemoteProtocolError(f"{len(piece)} bytes are not the {len(place)} of the tensor")
    place[:] = piece


def _apply_xor(place: Bytes, piece: Bytes, _: int) -> None:
    with _reader(piece) as frame:
        scratch = np.empty(min(_BLOCK_BYTES, len(place)), np.uint8)
        for start, end in _blocks(len(place), 1):
            block = scratch[: end - start]
            _fill(frame, block)
            place[start:end] ^= block
        _require_end(frame)


def _apply_sparse(place: Bytes, piece: Bytes, item_bytes: int) -> None:
    items = _items(place, item_bytes)
    with _reader(piece) as frame:
        count = np.empty(1, np.uint32)
        _fill(frame, count.view(np.uint8))
        n_changed = int(count[0])
        if n_changed > len(items):
            raise RemoteProtocolError(f"{n_changed} of {len(items)} elements cannot have changed")
        gaps = np.empty(n_changed, np.uint32)
        values = np.empty(n_changed, items.dtype)
        _fill(frame, gaps.view(np.uint8))
        _fill(frame, values.view(np.uint8))
        _require_end(frame)
    places = np.cumsum(gaps, dtype=np.uint64)
    # Ascending without repetition, so that the last one is the highest and none is written twice.
    if n_changed and (places[-1] >= len(items) or not gaps[1:].all()):
        raise RemoteProtocolError("positions of changed elements are outside of their tensor")
    items[places] ^= values


_APPLY: dict[str, Callable[[Bytes, Bytes, int], None]] = {
    "full": _apply_full,
    "xor": _apply_xor,
    "sparse": _apply_sparse,
}


def _items(content: Bytes, item_bytes: int) -> _Elements:
    return content.view(_ELEMENTS[item_bytes])


def _blocks(n_items: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    step = _BLOCK_BYTES // item_bytes
    for start in range(0, n_items, step):
        yield start, min(start + step, n_items)


def _reader(piece: Bytes) -> zstandard.ZstdDecompressionReader:
    # Read in pieces of ours: what a frame claims to hold is never allocated.
    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(piece.data)


def _fill(frame: zstandard.ZstdDecompressionReader, target: Bytes) -> None:
    filled = 0
    while filled < len(target):
        n_read = frame.readinto(target[filled:].data)
        if not n_read:
            raise RemoteProtocolError("the delta of a tensor ends early")
        filled += n_read


def _require_end(frame: zstandard.ZstdDecompressionReader) -> None:
    if frame.read(1):
        raise RemoteProtocolError("the delta of a tensor is too long")
