"""The bytes of a segment: its signature, lengths and checksums, and how its records are found.

Spec: docs/journal.md, "Segments", "Damage".
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, cast, overload

import google_crc32c

from rolloutbus.bus.wire.errors import BusError, RemoteProtocolError, SettingsError
from rolloutbus.replay.journal.records import KINDS, SALT_BYTES, Head, Record, Unknown, record_in

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# google-crc32c has no stubs for its two functions.


FORMAT = 1
_NAME = b"\xb2rolloutbus-journal"
_SALT = b"\xc4" + bytes([SALT_BYTES])
SIGNATURE = _NAME + bytes([FORMAT])
HEADER_BYTES = len(SIGNATURE) + len(_SALT) + SALT_BYTES
"""What comes before the first record."""
MARKER = 0xC6
PREFIX_BYTES = 1 + 4 + 4
"""Before a payload: marker, length, checksum."""
CRC_BYTES = 4
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024


class Content(Protocol):
    """The bytes of a segment: in memory, or read from its file as they are needed."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def find(self, byte: bytes, start: int, /) -> int:
        """Where the byte occurs next, from `start` on; -1: nowhere."""
        ...


class JournalError(BusError):
    """A journal cannot be read or written."""

    default_outcome = "failed"


class JournalFull(SettingsError):
    """The disk has no room for a journal, or fails; it may be tried again."""


class JournalDamaged(JournalError):
    """A journal is not whole; what is missing stands in `damage`."""

    def __init__(self, damage: "Damage") -> None:
        super().__init__(damage.sentence)
        self.damage = damage


class Damage(NamedTuple):
    """One place where records are not as they were written."""

    file: str
    offset: int
    """First wrong byte in the file; of records in a packed run, where the run begins."""
    size_bytes: int
    """From there to the next right record, or to the end."""
    first_missing: int
    """Numbers of the records that were there: from this one …"""
    n_missing: int
    """… so many; 0: none is missing, or it is not known."""
    why: str
    is_cut: bool = False
    """`n_missing` are the least: how many more followed is not known."""

    @property
    def sentence(self) -> str:
        """For people."""
        records = ""
        if self.is_cut:
            records = f"; record {self.first_missing} and those that followed are missing: "
            records += "how many they were is not known"
        elif self.n_missing:
            last = self.first_missing + self.n_missing - 1
            records = f"; records {self.first_missing} to {last} are missing"
        where = f"{self.file}: {self.size_bytes} bytes at offset {self.offset}"
        return f"{where}: {self.why}{records}"


class Framer:
    """Puts payloads of one segment into records, and takes them out."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self._crc_of_salt = cast("int", google_crc32c.value(salt))

    @property
    def header(self) -> bytes:
        """How the segment begins."""
        return SIGNATURE + _SALT + self.salt

    def frame(self, payload: bytes) -> bytes:
        """The record of a payload, which has at most MAX_PAYLOAD_BYTES."""
        length = (len(payload) + CRC_BYTES).to_bytes(4, "big")
        return b"".join((b"\xc6", length, self._crc(length, payload), payload))

    def payload_at(self, content: Content, offset: int) -> bytes | None:
        """What the record at `offset` holds; None if there is no right and whole one."""
        length = length_at(content, offset)
        if length < 0 or offset + PREFIX_BYTES + length > len(content):
            return None
        start = offset + PREFIX_BYTES
        payload = content[start : start + length]
        crc = content[start - CRC_BYTES : start]
        return payload if crc == self._crc(content[offset + 1 : offset + 5], payload) else None

    def _crc(self, length: bytes, payload: bytes) -> bytes:
        crc = cast("int", google_crc32c.extend(self._crc_of_salt, length))
        return cast("int", google_crc32c.extend(crc, payload)).to_bytes(4, "big")


def length_at(content: Content, offset: int) -> int:
    """Claimed bytes of the payload at `offset`; -1 if no record can begin there."""
    if len(content) - offset < PREFIX_BYTES or content[offset] != MARKER:
        return -1
    length = int.from_bytes(content[offset + 1 : offset + 5], "big") - CRC_BYTES
    return length if length <= MAX_PAYLOAD_BYTES else -1


def header_in(content: Content) -> tuple[int, bytes]:
    """Format (-1: no segment) and salt of a segment, from its first HEADER_BYTES or more."""
    number = content[len(_NAME)] if content[: len(_NAME)] == _NAME else -1
    return number, content[HEADER_BYTES - SALT_BYTES : HEADER_BYTES]


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
