"""Reading a journal: its records in order, and exactly what of it is missing.

Spec: docs/journal.md, "Damage".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bus.errors import RemoteProtocolError
from replay.journal.files import SegmentFile, content_of, segments_in
from replay.journal.format import Damage, Framer, JournalDamaged, JournalError
from replay.journal.pack import unpacked
from replay.journal.records import End, Lost, Packed, Record, Unknown
from replay.journal.scan import Found, Wrong, framer_of, scan


class Torn(NamedTuple):
    """Where the writer stopped in the middle of a record; everything before is there."""

    file: str
    offset: int
    size_bytes: int
    """Of what is there of it."""
    lacks_bytes: int
    """Of what is not; 0 if it does not say."""
    next_seq: int
    """Number that the torn record would have had."""


class _Suspense(NamedTuple):
    """Damage of which the next right record will tell how many records it cost."""

    file: str
    offset: int
    size_bytes: int
    why: str


class Journal:
    """The journal in a directory, as it is now. Reads only."""

    def __init__(self, directory: Path, *, skip: bool = False) -> None:
        """`skip`: go on behind damage; it stands in `damages`.

        Raises:
            JournalError: there is no journal.
        """
        if not directory.is_dir() or not segments_in(directory):
            raise JournalError(f"{directory} holds no journal")
        self.directory = directory
        self._skip = skip
        self._reset()

    def _reset(self) -> None:
        self.damages: list[Damage] = []
        self.torn: Torn | None = None
        """Set when all was read and the last segment is not closed by a whole record."""
        self.is_closed = False
        """Whether the last record read so far says that its writer had no more."""
        self._has_end = False
        self.n_unknown = 0
        """Records of kinds that this program does not know."""
        self.lost: list[Lost] = []
        """What the recorder itself says that it missed."""
        self.first_seq = self.next_seq = -1
        self._suspense: _Suspense | None = None

    def __iter__(self) -> Iterator[Record]:
        """All records, in order.

        Raises:
            JournalDamaged: something is missing here, it is no torn tail, and `skip` is off.
            JournalError: a later format.
        """
        self._reset()
        files = segments_in(self.directory)
        if files[0].number == 1:  # nothing has been deleted
            self.first_seq = self.next_seq = 0
        for file, after in zip(files, [*files[1:], None], strict=True):
            for record in self._segment(file, is_last=after is None):
                if isinstance(record, Unknown):
                    self.n_unknown += 1
                    continue
                if isinstance(record, Lost):
                    self.lost.append(record)
                yield record
            if after is not None and after.number != file.number + 1:
                self._suspend(_Suspense(after.path.name, 0, 0, "a segment before it is not there"))
        if self._suspense is not None:
            self._report(0)

    def _segment(self, file: SegmentFile, *, is_last: bool) -> Iterator[Record | Unknown]:
        content = content_of(file)
        if not content and not file.path.exists():
            if self.next_seq == 0:  # retention was faster: the journal begins later now
                self.first_seq = self.next_seq = -1
            return
        self.is_closed = self._has_end = False
        framer = framer_of(content)
        if framer is None:
            self._wrong(file, Wrong(0, len(content), is_tail=True, lacks_bytes=0), is_last=is_last)
            return
        for found in scan(framer, content):
            if isinstance(found, Wrong):
                self._wrong(file, found, is_last=is_last)
                continue
            for record in self._unpacked(file, framer, found):
                if self._is_next(file, found, record):
                    self._has_end = isinstance(record, End)
                    self.is_closed = isinstance(record, End) and record.reason != "rotated"
                    yield record

    def _unpacked(
        self, file: SegmentFile, framer: Framer, found: Found
    ) -> list[Record] | list[Record | Unknown]:
        if not isinstance(found.record, Packed):
            return [found.record]
        try:
            return [each.record for each in unpacked(framer, found.record)]
        except RemoteProtocolError as error:
            size_bytes = found.end - found.offset
            self._suspend(_Suspense(file.path.name, found.offset, size_bytes, str(error)))
            return []

    def _wrong(self, file: SegmentFile, wrong: Wrong, *, is_last: bool) -> None:
        size_bytes = wrong.end - wrong.offset
        if is_last and wrong.is_tail and not self._has_end:
            self.torn = Torn(
                file.path.name, wrong.offset, size_bytes, wrong.lacks_bytes, max(self.next_seq, 0)
            )
            return
        why = "no segment" if wrong.offset == 0 else "no right record"
        self._suspend(_Suspense(file.path.name, wrong.offset, size_bytes, why))
        if is_last and wrong.is_tail:
            self._report(0)

    def _is_next(self, file: SegmentFile, found: Found, record: Record | Unknown) -> bool:
        """Whether the record comes after those before; says what is missing between them."""
        if self.first_seq < 0:
            self.first_seq = self.next_seq = record.seq
        if record.seq < self.next_seq:
            size_bytes = found.end - found.offset
            why = f"record {record.seq} after {self.next_seq - 1}"
            self._suspend(_Suspense(file.path.name, found.offset, size_bytes, why))
            return False
        if self._suspense is None and record.seq > self.next_seq:
            self._suspend(_Suspense(file.path.name, found.offset, 0, "records are not there"))
        if self._suspense is not None:
            self._report(record.seq - self.next_seq)
        self.next_seq = record.seq + 1
        return True

    def _suspend(self, suspense: _Suspense) -> None:
        if self._suspense is not None:
            self._report(0)
        self._suspense = suspense

    def _report(self, n_missing: int) -> None:
        assert self._suspense is not None
        file, offset, size_bytes, why = self._suspense
        self._suspense = None
        damage = Damage(file, offset, size_bytes, max(self.next_seq, 0), n_missing, why)
        self.damages.append(damage)
        if not self._skip:
            raise JournalDamaged(damage)
