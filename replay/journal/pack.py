"""Closed segments made small: runs of records, each in a zstd frame of its own.

Spec: docs/journal.md, "packed".
"""

# pyright: reportUnknownMemberType=false
# The stubs of zstandard leave parameters untyped.

from collections.abc import Iterator

import zstandard

from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.replay.journal.format import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Content,
    Found,
    Framer,
    JournalError,
    Wrong,
    scan,
)
from rolloutbus.replay.journal.records import End, Head, Packed, Record, Unknown, payload_of

RUN_BYTES = 1024 * 1024
LEVEL = 3


def packed(framer: Framer, content: Content) -> Iterator[bytes]:
    """A closed segment in pieces of its packed form, in order.

    Raises:
        JournalError: it is damaged.
    """
    run = _Run(framer, content)
    for found in scan(framer, content):
        if isinstance(found, Wrong):
            raise JournalError(f"damaged at offset {found.offset}")
        is_clear = isinstance(found.record, Head | End)
        if run.n_records and (is_clear or run.size_bytes >= RUN_BYTES):
            yield run.piece()
        if is_clear:
            is_first = found.offset == HEADER_BYTES
            yield content[0 if is_first else found.offset : found.end]
        else:
            run.add(found)


def unpacked(framer: Framer, run: Packed) -> list[Found]:
    """The records of a run, with offsets within it.

    Raises:
        RemoteProtocolError: it holds something else than it says.
    """
    try:
        if zstandard.frame_content_size(run.content) != run.size_bytes:  # what it would allocate
            raise RemoteProtocolError("a run holds something else than it says")
        content = zstandard.ZstdDecompressor().decompress(run.content)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"a run that cannot be unpacked: {error}") from error
    found = [each for each in scan(framer, content, 0) if isinstance(each, Found)]
    if len(found) != run.n_records:
        raise RemoteProtocolError("a run holds something else than it says")
    return found


class _Run:
    """Consecutive records that will be packed together."""

    def __init__(self, framer: Framer, content: Content) -> None:
        self._framer = framer
        self._content = content
        self._zstd = zstandard.ZstdCompressor(level=LEVEL)
        self._first: Record | Unknown | None = None
        self._start = self._end = 0
        self.n_records = 0

    @property
    def size_bytes(self) -> int:
        """So far, unpacked."""
        return self._end - self._start

    def add(self, found: Found) -> None:
        if not self.n_records:
            self._first, self._start = found.record, found.offset
        self._end = found.end
        self.n_records += 1

    def piece(self) -> bytes:
        """The run as a record; the next one begins."""
        plain = self._content[self._start : self._end]
        assert self._first is not None
        small = self._zstd.compress(plain)
        run = Packed(self._first.seq, self._first.at_ns, self.n_records, len(plain), small)
        payload = payload_of(run)
        self.n_records = 0
        self._start = self._end
        # A record of the largest size that does not get smaller stays as it is.
        return self._framer.frame(payload) if len(payload) <= MAX_PAYLOAD_BYTES else plain
