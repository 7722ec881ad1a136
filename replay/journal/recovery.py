"""What a writer does with the journal that an earlier one has left: cut the torn tail, go on.

Spec: docs/journal.md, "Damage".
"""

import os
from pathlib import Path
from typing import NamedTuple

from rolloutbus.replay.journal.content import SegmentContent
from rolloutbus.replay.journal.files import (
    SegmentFile,
    forget_first,
    segments_in,
    sync_directory,
    write_all,
)
from rolloutbus.replay.journal.format import Content, Framer, JournalError
from rolloutbus.replay.journal.records import End, Head, Packed, payload_of
from rolloutbus.replay.journal.scan import Wrong, framer_of, scan


class Recovered(NamedTuple):
    """Where the next writer begins."""

    next_seq: int
    next_segment: int
    journal: str
    """Name of the journal; empty if it is new."""
    cut_bytes: int
    """Of the torn tail that was cut off."""
    unpacked: tuple[int, ...]
    """Closed segments that are yet to be packed."""


class _Tail(NamedTuple):
    """What the last segment says of its end."""

    next_seq: int
    n_records: int
    is_closed: bool
    journal: str
    good_bytes: int
    at_ns: int


def recover(directory: Path, now_ns: int) -> Recovered:
    """Make the journal in a directory, which may be empty, ready for another writer.

    Raises:
        OSError: the disk is full, or broken.
        JournalError: its last segment is of a later format.
    """
    _tidy(directory)
    files = segments_in(directory)
    cut_bytes = 0
    tail: _Tail | None = None
    framer: Framer | None = None
    while files:
        with SegmentContent(files[-1].path) as content:
            size_bytes = len(content)
            framer = framer_of(content)
            tail = _tail_of(framer, content) if framer is not None else None
        if tail is not None or size_bytes > _HEADS_BYTES:
            break
        files.pop().path.unlink()  # its writer died before its first record was there
        cut_bytes += size_bytes
    if not files:
        forget_first(directory)
        return Recovered(0, 1, "", cut_bytes, ())
    last = files[-1]
    if tail is None or framer is None:
        raise JournalError(f"{last.path}: its beginning is damaged; begin a journal elsewhere")
    if not tail.is_closed:
        cut_bytes += last.path.stat().st_size - tail.good_bytes
        tail = _close(last, framer, tail, now_ns)
    plain = tuple(each.number for each in files if not each.is_packed)
    return Recovered(tail.next_seq, last.number + 1, tail.journal, cut_bytes, plain)


_HEADS_BYTES = 4096
"""No head is longer; a file that is, and has none, was not torn while it was begun."""


def _tidy(directory: Path) -> None:
    for path in directory.glob("*.tmp"):
        path.unlink()
    for path in directory.glob("*.rbz"):
        path.with_suffix(".rbj").unlink(missing_ok=True)


def _tail_of(framer: Framer, content: Content) -> _Tail | None:
    journal, next_seq, first_seq, good_bytes, at_ns = "", -1, -1, 0, 0
    is_closed = False
    for found in scan(framer, content):
        if isinstance(found, Wrong):
            continue
        record = found.record
        if isinstance(record, Head):
            journal, first_seq = record.journal, record.seq
        is_closed = isinstance(record, End)
        n_records = record.n_records if isinstance(record, Packed) else 1
        next_seq, good_bytes, at_ns = record.seq + n_records, found.end, record.at_ns
    if next_seq < 0:
        return None
    return _Tail(next_seq, next_seq - max(first_seq, 0), is_closed, journal, good_bytes, at_ns)


def _close(last: SegmentFile, framer: Framer, tail: _Tail, now_ns: int) -> _Tail:
    """Cut what is torn, and say so in the segment's last record."""
    descriptor = os.open(last.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        cut_bytes = os.fstat(descriptor).st_size - tail.good_bytes
        os.ftruncate(descriptor, tail.good_bytes)
        os.lseek(descriptor, 0, os.SEEK_END)
        # After a reboot the clock is behind that of the records.
        at_ns = max(now_ns, tail.at_ns)
        end = End(tail.next_seq, at_ns, "recovered", tail.n_records, cut_bytes)
        write_all(descriptor, framer.frame(payload_of(end)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(last.path.parent)
    return tail._replace(next_seq=tail.next_seq + 1, is_closed=True)
