"""Reading a journal: its records in order, and exactly what of it is missing.

Spec: docs/journal.md, "Damage".
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.replay.journal.files import (
    SegmentFile,
    content_of,
    first_kept,
    is_being_written,
    next_seq_beside,
    segments_in,
)
from rolloutbus.replay.journal.format import (
    Content,
    Damage,
    Found,
    Framer,
    JournalDamaged,
    JournalError,
    Wrong,
    framer_of,
    scan,
)
from rolloutbus.replay.journal.pack import unpacked
from rolloutbus.replay.journal.records import End, LostRecord, Packed, Record, Unknown


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


GapKind = Literal["damage", "tail", "interruption", "lost", "lost_stream"]


class JournalGap(NamedTuple):
    """Something that happened but is missing from the journal, or damaged in it."""

    kind: GapKind
    """`damage`: it was written, and is not there any more. `tail`: the journal has no end: its
    writer died, or the end was cut off. `interruption`: the same, and another writer went on.
    `lost`: the recorder says that it missed commands or replies; `lost_stream`: tokens on their
    way, which results have again."""
    sentence: str


class Journal:
    """Reads a journal directory, also while it is being written."""

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
        self.lost: list[LostRecord] = []
        """What the recorder itself says that it missed."""
        self.first_seq = self.next_seq = -1
        """Of the first record that is to be there: above 0 after retention; -1: nothing was read.
        And of the one that comes next."""
        self.is_being_written = False
        """Whether a writer was at work when reading began: then the journal has no end yet."""
        self._interruptions: list[JournalGap] = []
        self._ending = ""
        """Why the journal does not end where its writer said; empty: it does, or may."""
        self._suspense: Damage | None = None
        """The next right record will tell how many records it cost."""

    @property
    def gaps(self) -> list[JournalGap]:
        """Everything that is known to be missing, when all has been read; empty: nothing is."""
        found = [JournalGap("damage", each.sentence) for each in self.damages]
        found += self._interruptions
        if self._ending:
            found.append(JournalGap("tail", self._ending))
        counts = Counter[str]()
        for each in self.lost:
            counts[each.source] += each.count
        if n := counts["tap"]:
            found.append(
                JournalGap("lost", f"the recorder missed {n:,} messages of the router's tap")
            )
        if n := counts["memory"]:
            found.append(JournalGap("lost", f"{n:,} messages had no room: the disk was too slow"))
        if n := counts["stream"]:
            found.append(JournalGap("lost_stream", f"the recorder missed {n:,} tokens of streams"))
        return found

    def __iter__(self) -> Iterator[Record]:
        """All records, in order.

        Raises:
            JournalDamaged: something is missing here, it is no torn tail, and `skip` is off.
            JournalError: a later format.
        """
        self._reset()
        self.is_being_written = is_being_written(self.directory)
        # Retention writes down what it keeps, then deletes: so this is read first.
        first = first_kept(self.directory)
        files = [each for each in segments_in(self.directory) if each.number >= first.segment]
        self.first_seq = self.next_seq = first.seq
        if not files:
            self._ending = "every segment that retention has left is gone"
            return
        if files[0].number != first.segment:
            why = "a segment before it is not there"
            self._suspend(files[0].path.name, 0, 0, why)
        for file, after in zip(files, [*files[1:], None], strict=True):
            for record in self._segment(file, is_last=after is None):
                if isinstance(record, Unknown):
                    self.n_unknown += 1
                    continue
                if isinstance(record, LostRecord):
                    self.lost.append(record)
                yield record
            if after is not None and after.number != file.number + 1:
                self._suspend(after.path.name, 0, 0, "a segment before it is not there")
        if self._suspense is not None:
            self._report(1, is_cut=True)  # no right record follows that has a number
        self._end(files[-1].path.name)

    def _end(self, file: str) -> None:
        """Tell whether the last segment ends as its writer ended it."""
        if self.is_being_written or self.is_closed:
            return
        following = f"what followed record {self.next_seq - 1} is missing"
        if self.torn is not None:
            cut = f"ends within record {self.torn.next_seq}, after {self.torn.size_bytes} bytes"
            self._ending = f"{file} {cut}: its writer died, or it was cut; {following}"
        elif self._has_end:
            why = "it was removed, or its writer died as it began it"
            self._ending = f"{file} says that another segment follows, and none does: {why}"
        elif not self.damages or self.damages[-1].file != file:
            self._ending = f"{file} has no end: its writer died, or it was cut; {following}"

    def _segment(self, file: SegmentFile, *, is_last: bool) -> Iterator[Record | Unknown]:
        content = content_of(file)
        if content is None:
            if self.next_seq == self.first_seq:  # retention was faster: it begins later now
                self.first_seq = self.next_seq = max(self.first_seq, first_kept(self.directory).seq)
            return
        with content:
            yield from self._records(file, content, is_last=is_last)

    def _records(
        self, file: SegmentFile, content: Content, *, is_last: bool
    ) -> Iterator[Record | Unknown]:
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
                    self.is_closed = isinstance(record, End) and record.reason == "closed"
                    if isinstance(record, End) and record.reason == "recovered":
                        self._interrupted(file, record)
                    yield record
        if is_last and file.is_packed and not self._has_end:
            # Only closed segments are packed: this is no writer's doing.
            if self._suspense is None:
                why = "a sealed segment ends before its end"
                self._suspend(file.path.name, len(content), 0, why)
            n_missing = next_seq_beside(file.path, framer) - max(self.next_seq, 0)
            if n_missing > 0:
                self._report(n_missing)
            else:
                self._report(1, is_cut=True)  # at least its end

    def _interrupted(self, file: SegmentFile, end: End) -> None:
        cut = f"{end.cut_bytes} bytes of a torn record were cut off, and " if end.cut_bytes else ""
        sentence = (
            f"{file.path.name}: its writer died, or its disk was full, after record "
            f"{end.seq - 1}: {cut}what it had not written, and all until the next writer began, is "
            "missing"
        )
        self._interruptions.append(JournalGap("interruption", sentence))

    def _unpacked(
        self, file: SegmentFile, framer: Framer, found: Found
    ) -> list[Record] | list[Record | Unknown]:
        if not isinstance(found.record, Packed):
            return [found.record]
        try:
            return [each.record for each in unpacked(framer, found.record)]
        except RemoteProtocolError as error:
            size_bytes = found.end - found.offset
            self._suspend(file.path.name, found.offset, size_bytes, str(error))
            return []

    def _wrong(self, file: SegmentFile, wrong: Wrong, *, is_last: bool) -> None:
        size_bytes = wrong.end - wrong.offset
        if is_last and wrong.is_tail and not self._has_end and not file.is_packed:
            self.torn = Torn(
                file.path.name, wrong.offset, size_bytes, wrong.lacks_bytes, max(self.next_seq, 0)
            )
            return
        why = "no segment" if wrong.offset == 0 else "no right record"
        self._suspend(file.path.name, wrong.offset, size_bytes, why)
        if is_last and wrong.is_tail and not file.is_packed:
            self._report(0)

    def _is_next(self, file: SegmentFile, found: Found, record: Record | Unknown) -> bool:
        """Whether the record comes after those before; says what is missing between them."""
        if self.first_seq < 0:
            self.first_seq = self.next_seq = record.seq
        if record.seq < self.next_seq:
            size_bytes = found.end - found.offset
            why = f"record {record.seq} after {self.next_seq - 1}"
            self._suspend(file.path.name, found.offset, size_bytes, why)
            return False
        if self._suspense is None and record.seq > self.next_seq:
            self._suspend(file.path.name, found.offset, 0, "records are not there")
        if self._suspense is not None:
            self._report(record.seq - self.next_seq)
        self.next_seq = record.seq + 1
        return True

    def _suspend(self, file: str, offset: int, size_bytes: int, why: str) -> None:
        if self._suspense is not None:
            self._report(0)
        self._suspense = Damage(file, offset, size_bytes, 0, 0, why)

    def _report(self, n_missing: int, *, is_cut: bool = False) -> None:
        assert self._suspense is not None
        first_missing = max(self.next_seq, 0)
        damage = self._suspense._replace(
            first_missing=first_missing, n_missing=n_missing, is_cut=is_cut
        )
        self._suspense = None
        self.damages.append(damage)
        if not self._skip:
            raise JournalDamaged(damage)
