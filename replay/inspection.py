"""Reads our files with a plain MessagePack library, without the project's own types.

So a frame, a segment of a journal or a file of dead letters can be read that this version of the
program would not take. Spec: docs/protocol.md, "Frames"; docs/journal.md, "Segments".
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgpack
import zstandard

from rolloutbus.bus.wire.codec import SIGNATURE
from rolloutbus.replay.journal.format import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    Framer,
    JournalError,
    header_in,
    length_at,
)

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Frames and dead letters above this are not read."""
SHOWN_BYTES = 32
"""Of binary values, unless all is asked for."""


class PackedRun(NamedTuple):
    """A record of the kind `packed`, after its number and time."""

    n_records: int
    size_bytes: int
    content: bytes


def inspect(path: Path, *, shows_all: bool = False) -> Iterator[Any]:
    """The values of a file, one after the other, in forms that JSON has.

    Args:
        path: a frame (entries), a segment of a journal (records) or dead letters (maps).
        shows_all: all bytes of binary values, not only the first 32.

    Raises:
        JournalError: it is none of these, empty, no regular file, or not whole; what comes before
            the fault was given.
        OSError: it cannot be read.
    """
    if not path.is_file():
        path.stat()  # OSError: there is nothing
        raise JournalError("it is no regular file")  # a device or a pipe may have no end
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
        file.seek(0)
        if not start:
            raise JournalError("it is empty")
        if start[:2] == SIGNATURE[:2]:
            values = _entries(file)
        elif header_in(start)[0] >= 0:
            values = _records(file, start)
        else:
            values = _maps(file)
        for value in values:
            yield _plain(value, None if shows_all else SHOWN_BYTES)


def _entries(file: BinaryIO) -> Iterator[object]:
    frame = file.read(MAX_FRAME_BYTES + 1)
    if len(frame) > MAX_FRAME_BYTES:
        raise JournalError(f"a frame of more than {MAX_FRAME_BYTES} bytes is none of the bus")
    entries = _unpacked(frame[len(SIGNATURE) :], len(SIGNATURE))
    if not isinstance(entries, list):
        raise JournalError("the frame holds no list of entries")
    yield from cast("list[object]", entries)


def _records(file: BinaryIO, start: bytes) -> Iterator[object]:
    _, salt = header_in(start)
    framer, offset = Framer(salt), HEADER_BYTES
    file.seek(offset)
    while prefix := file.read(PREFIX_BYTES):
        length = length_at(prefix, 0)
        record = prefix + file.read(max(length, 0))
        payload = framer.payload_at(record, 0)
        if payload is None:
            raise JournalError(f"no whole record begins at offset {offset}; nothing behind is read")
        yield from _with_run(framer, _unpacked(payload, offset), offset)
        offset += len(record)


def _with_run(framer: Framer, record: object, offset: int) -> Iterator[object]:
    """The record, or those that it is a packed run of."""
    values = cast("list[Any]", record) if isinstance(record, list) else []
    if not values or values[0] != "packed":
        yield record
        return
    run = PackedRun(*values[3:6])
    try:
        if not zstandard.frame_content_size(run.content) == run.size_bytes <= 2 * MAX_PAYLOAD_BYTES:
            raise JournalError(f"the run at offset {offset} holds something else than it says")
        content = zstandard.ZstdDecompressor().decompress(run.content)
    except zstandard.ZstdError as error:
        raise JournalError(f"the run at offset {offset} cannot be unpacked: {error}") from error
    place = 0
    while place < len(content):
        payload = framer.payload_at(content, place)
        if payload is None:
            raise JournalError(f"the run at offset {offset} has no whole record at {place}")
        yield _unpacked(payload, offset)
        place += PREFIX_BYTES + len(payload)


def _maps(file: BinaryIO) -> Iterator[object]:
    unpacker: Any = cast("Any", msgpack).Unpacker
    reader = unpacker(
        file, object_pairs_hook=_map_of, strict_map_key=False, max_buffer_size=MAX_FRAME_BYTES
    )
    offset = 0
    try:
        for value in reader:
            if not isinstance(value, dict):
                break
            yield cast("dict[str, object]", value)
            offset = int(reader.tell())
    except (ValueError, msgpack.UnpackException) as error:
        raise JournalError(f"no MessagePack value at offset {offset}: {error}") from error
    size_bytes = file.seek(0, 2)
    if offset < size_bytes:
        what = "no whole map of MessagePack" if offset else "neither a frame, a segment nor maps"
        raise JournalError(f"{what}: the last {size_bytes - offset} bytes, from offset {offset}")


def _unpacked(content: bytes, offset: int) -> object:
    try:
        return cast("Any", msgpack).unpackb(
            content, object_pairs_hook=_map_of, strict_map_key=False
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise JournalError(f"no MessagePack at offset {offset}: {error}") from error


def _map_of(pairs: list[tuple[object, object]]) -> dict[str, object]:
    """A map with keys as JSON has them: MessagePack's may also be lists and maps."""
    return {key if isinstance(key, str) else repr(key): value for key, value in pairs}


def _plain(value: object, n_shown: int | None) -> Any:  # noqa: ANN401 - what JSON has
    """The same in JSON's forms: bytes as their number and hexadecimal digits."""
    match value:
        case bytes():
            return {"bytes": len(value), "hex": value[:n_shown].hex()}
        case dict():
            items = cast("dict[str, object]", value).items()
            return {key: _plain(each, n_shown) for key, each in items}
        case list():
            return [_plain(each, n_shown) for each in cast("list[object]", value)]
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case _:
            return repr(value)
