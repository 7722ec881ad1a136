"""Finds the records in the bytes of a segment, and what is between them that is none.

Spec: docs/journal.md, "Damage".
"""

from collections.abc import Iterator
from typing import NamedTuple

from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.replay.journal.format import (
    FORMAT,
    HEADER_BYTES,
    PREFIX_BYTES,
    Content,
    Framer,
    JournalError,
    header_in,
    length_at,
)
from rolloutbus.replay.journal.records import KINDS, Head, Record, Unknown, record_in

_MARKER = b"\xc6"
_FIXARRAY, _FIXSTR = 0x90, 0xA0
_LEAST_BYTES = 4
"""Of a payload: an array with a kind and two numbers."""


class Found(NamedTuple):
    """A right record."""

    offset: int
    end: int
    record: Record | Unknown


class Wrong(NamedTuple):
    """Bytes that are no record."""

    offset: int
    end: int
    """Where the next right record begins, or the end."""
    is_tail: bool
    """No right record comes after them."""
    lacks_bytes: int
    """How many bytes more a torn last record would have had; 0 if it does not say."""


def framer_of(content: Content) -> Framer | None:
    """How the records of a segment are framed; None if its beginning tells nothing.

    Raises:
        JournalError: a later format.
    """
    if len(content) < HEADER_BYTES:
        return None
    number, salt = header_in(content)
    framer = Framer(salt)
    head = _record_at(framer, content, HEADER_BYTES) or _head_by_its_own_salt(content)
    if head is not None and isinstance(head.record, Head):  # it says everything again
        number, framer = head.record.format, Framer(head.record.salt)
    if number > FORMAT:
        raise JournalError(f"format {number}; this program reads up to {FORMAT}")
    return framer


def _head_by_its_own_salt(content: Content) -> Found | None:
    """One wrong bit in the salt must not cost the segment."""
    length = max(length_at(content, HEADER_BYTES), 0)
    try:
        head = record_in(
            content[HEADER_BYTES + PREFIX_BYTES : HEADER_BYTES + PREFIX_BYTES + length]
        )
    except RemoteProtocolError:
        return None
    return _record_at(Framer(head.salt), content, HEADER_BYTES) if isinstance(head, Head) else None


def scan(framer: Framer, content: Content, start: int = HEADER_BYTES) -> Iterator[Found | Wrong]:
    """All records from `start` on, in order, and what is wrong between them."""
    at = start
    while at < len(content):
        found = _record_at(framer, content, at)
        if found is not None:
            yield found
            at = found.end
            continue
        after = _next_after(framer, content, at)
        is_tail = after == len(content)
        length = length_at(content, at)
        lacks = max(at + PREFIX_BYTES + length - after, 0) if is_tail and length >= 0 else 0
        yield Wrong(at, after, is_tail, lacks)
        at = after


def _record_at(framer: Framer, content: Content, offset: int) -> Found | None:
    payload = framer.payload_at(content, offset)
    if payload is None:
        return None
    try:
        record = record_in(payload)
    except RemoteProtocolError:
        return None
    return Found(offset, offset + PREFIX_BYTES + len(payload), record)


def _next_after(framer: Framer, content: Content, wrong: int) -> int:
    """Where the first right record after a wrong one begins; the length if there is none."""
    at = content.find(_MARKER, wrong + 1)
    while at >= 0:
        # Cheap looks first: a checksum of megabytes at each such byte would take for ever.
        if _may_begin(content, at) and _record_at(framer, content, at) is not None:
            return at
        at = content.find(_MARKER, at + 1)
    return len(content)


def _may_begin(content: Content, offset: int) -> bool:
    start = offset + PREFIX_BYTES
    length = length_at(content, offset)
    if length < _LEAST_BYTES or start + length > len(content) or content[start] & 0xF0 != _FIXARRAY:
        return False
    n_chars = content[start + 1] - _FIXSTR
    kind = content[start + 2 : start + 2 + max(n_chars, 0)]
    return kind.decode("ascii", "replace") in KINDS
