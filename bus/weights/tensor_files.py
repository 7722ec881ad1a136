"""The safetensors format: headers that say where each tensor lies, and reading tensors from files.

Eight bytes of length, that much JSON, then the tensors without gaps. The safetensors package is not
always installed and would want all bytes in one piece.
Source: https://github.com/huggingface/safetensors#format
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from rolloutbus.bus.weights.manifest import DTYPES, Bytes, bytes_of
from rolloutbus.bus.wire.codec import runs_within
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import Tensor

MAX_SHARD_BYTES = 2 * 1024**3
"""A file holds more only if one tensor does."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
LENGTH_BYTES = 8
MANIFEST = "manifest.json"
_ALIGN_BYTES = 8


class FileRange(NamedTuple):
    """Place and type of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, within the file."""
    size_bytes: int


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def shard_name(number: int) -> str:
    """Name of the file with this number; they count from 1."""
    return f"model-{number:05d}.safetensors"


def shards(tensors: Sequence[Tensor], max_bytes: int = MAX_SHARD_BYTES) -> list[list[Tensor]]:
    """The tensors of each file, in order."""
    return runs_within(max_bytes, tensors, lambda each: each.size_bytes)


def header_of(tensors: Sequence[Tensor]) -> bytes:
    """The header of a file that holds these tensors one after another."""
    ends = list(accumulate(each.size_bytes for each in tensors))
    entries = {
        each.name: _Entry(each.dtype, each.shape, (end - each.size_bytes, end))
        for each, end in zip(tensors, ends, strict=True)
    }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(length: bytes) -> int:
    """Size of the JSON, from the first eight bytes of a file.

    Raises:
        RemoteProtocolError: no header is so long.
    """
    size_bytes = int.from_bytes(length, "little")
    if len(length) != LENGTH_BYTES or not 0 < size_bytes <= MAX_HEADER_BYTES:
        raise RemoteProtocolError("this is no safetensors file: its header has no possible length")
    return size_bytes


def parse_header(text: bytes, file_bytes: int) -> Mapping[str, FileRange]:
    """Places of all tensors in a file of `file_bytes`, by name.

    Raises:
        RemoteProtocolError: it is no header, or points outside of the file.
    """
    try:
        entries = msgspec.json.decode(text, type=dict[str, Any])
        entries.pop("__metadata__", None)
        known = msgspec.convert(entries, dict[str, _Entry])
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"this is no safetensors file: {error}") from error
    first = LENGTH_BYTES + len(text)
    ranges: dict[str, FileRange] = {}
    for name, entry in known.items():
        start, end = entry.data_offsets
        if not 0 <= start <= end <= file_bytes - first or entry.dtype not in DTYPES:
            raise RemoteProtocolError(f"tensor {name[:80]!r} does not lie in its file")
        ranges[name] = FileRange(entry.dtype, entry.shape, first + start, end - start)
    return ranges


def read_shards(
    open_shard: Callable[[str], int], tensors: Sequence[Tensor], content: Bytes
) -> None:
    """Fill `content` with the bytes of all tensors; their digests are not verified.

    Args:
        open_shard: file name -> descriptor, which is closed here.
        tensors: what the files must hold, and where it belongs in `content`.
        content: uint8 [at least the size of the version].

    Raises:
        RemoteProtocolError: the files do not hold these tensors.
        OSError: the disk failed.
    """
    missing = {each.name: each for each in tensors}
    number = 1
    while missing:
        name = shard_name(number)
        fd = open_shard(name)
        try:
            found = _read_file(fd, missing, content)
        finally:
            os.close(fd)
        if not found:
            raise RemoteProtocolError(f"{name} holds none of the {len(missing)} missing tensors")
        for each in found:
            del missing[each]
        number += 1


def _read_file(fd: int, wanted: Mapping[str, Tensor], content: Bytes) -> list[str]:
    length = header_bytes(os.pread(fd, LENGTH_BYTES, 0))
    ranges = parse_header(os.pread(fd, length, LENGTH_BYTES), os.fstat(fd).st_size)
    found = [name for name in ranges if name in wanted]
    for name in found:
        _read_tensor(fd, ranges[name], wanted[name], content)
    return found


def _read_tensor(fd: int, where: FileRange, tensor: Tensor, content: Bytes) -> None:
    if (where.dtype, where.shape, where.size_bytes) != (
        tensor.dtype,
        tensor.shape,
        tensor.size_bytes,
    ):
        raise RemoteProtocolError(f"tensor {tensor.name!r} is another one in its file")
    place = bytes_of(content, tensor).data
    n_read = 0
    while n_read < len(place):
        n_new = os.preadv(fd, [place[n_read:]], where.start + n_read)
        if not n_new:
            raise RemoteProtocolError(f"the file of tensor {tensor.name!r} ends early")
        n_read += n_new
