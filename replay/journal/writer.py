"""The shell of a journal's writer: the clock, and a thread that waits for the disk.

The event loop never waits: records go into memory, which is bounded. Spec: docs/journal.md.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.replay.journal.core import (
    Begin,
    Effect,
    FinishSegment,
    JournalCore,
    JournalIdentity,
    JournalSettings,
    Write,
)
from rolloutbus.replay.journal.files import (
    JournalSegment,
    SegmentContent,
    SegmentFile,
    forget_first,
    lock,
    pack,
    retain,
    segments_in,
    sync_directory,
    unusable,
    write_all,
)
from rolloutbus.replay.journal.format import Content, Framer, JournalError, Wrong, framer_of, scan
from rolloutbus.replay.journal.records import End, Head, Packed, Record, payload_of


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


def now_ns() -> int:
    """Nanoseconds of CLOCK_BOOTTIME."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class JournalWriter:
    """Appends to the journal in a directory. An async context manager."""

    def __init__(
        self,
        directory: Path,
        settings: JournalSettings | None = None,
        *,
        filter_text: str = "",
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        """Calls `on_problem` once, with the reason, when recording stops."""
        self.directory = directory
        self._settings = settings or JournalSettings()
        self._filter = filter_text
        self._on_problem = on_problem
        self._lock: int | None = None
        self._file = JournalSegment(directory)
        self._disk = ThreadPoolExecutor(1, "journal")
        self._packer = ThreadPoolExecutor(1, "journal-packer")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """When it is due, by the loop's clock."""
        self._writing: asyncio.Future[None] | None = None
        self._news = asyncio.Event()
        """A write has ended."""
        self._is_closing = False
        self.core: JournalCore
        """What is durable, lost and wrong; there is one once the writer has been entered."""
        self.cut_bytes = 0
        """Of a torn tail that an earlier writer left."""
        self.n_unpacked = 0
        """Closed segments that could not be packed; they are whole, and larger."""

    async def __aenter__(self) -> Self:
        """Take the directory, mend its end, begin a segment.

        Raises:
            SettingsError: another process writes there, or it cannot be written to; JournalFull:
                the disk has no room, or fails.
            JournalError: what is there cannot be continued.
        """
        self._loop = asyncio.get_running_loop()
        # In the disk's thread: the loop may serve others meanwhile.
        beginning = self._loop.run_in_executor(self._disk, self._begin)
        try:
            found = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._given_up)
            await asyncio.wait([beginning])
            raise
        except OSError as error:
            self._file.close()
            self._release()
            raise unusable(self.directory, error) from error
        except BusError:
            self._release()
            raise
        self.core.synced()
        for segment in found.unpacked:
            self._packer.submit(self._pack, segment)
        self._arm()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Write the end; what was appended is durable afterwards, unless there is a problem."""
        self._is_closing = True
        await self._written()
        if self._timer is not None:
            self._timer.cancel()
        self._write(self.core.close(now_ns()))
        await self._written()
        self._file.close()
        await self._loop.run_in_executor(None, self._packer.shutdown)
        self._release()

    def append(self, build: Callable[[int, int], Record]) -> bool:
        """Take the record that `build` makes of its number and the time; False if it is lost."""
        now = now_ns()
        was_taken = self.core.append(lambda seq: build(seq, now), now)
        if self._writing is None:
            self._arm()
        return was_taken

    async def sync(self) -> None:
        """Wait until everything that was appended so far is durable.

        Raises:
            JournalError: it never will be.
        """
        last = self.core.next_seq - 1
        while self.core.durable < last:
            if self.core.problem:
                raise JournalError(self.core.problem)
            self._news.clear()
            await self._news.wait()

    def _begin(self) -> Recovered:
        self._lock = lock(self.directory)
        found = recover(self.directory, now_ns())
        self.core = self._core_after(found)
        self.cut_bytes = found.cut_bytes
        self._carry_out(self.core.start(now_ns(), time.time_ns()))
        return found

    def _given_up(self, _: asyncio.Future[Recovered]) -> None:
        """Let go of what was begun for somebody who does not want it any more."""
        self._file.close()
        self._release()

    def _core_after(self, found: Recovered) -> JournalCore:
        journal = found.journal or secrets.token_hex(16)
        return JournalCore(
            self._settings,
            JournalIdentity(journal, socket.gethostname()[:256], self._filter[:4096]),
            secrets.token_bytes,
            first_seq=found.next_seq,
            first_segment=found.next_segment,
        )

    def _arm(self) -> None:
        """Look again when something is due."""
        if self._is_closing or self.core.problem:
            return
        at = self._loop.time() + self.core.due_in_s(now_ns())
        # Not `timer.when()`: what uvloop is to call at once has none.
        if self._timer is None or self._timer_at > at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._loop.call_at(at, self._look), at

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None:
            self._write(self.core.due(now_ns(), time.time_ns()))
        if self._writing is None:
            self._arm()

    def _write(self, effects: Sequence[Effect]) -> None:
        if effects:
            self._writing = self._loop.run_in_executor(self._disk, self._carry_out, effects)
            self._writing.add_done_callback(self._done)

    def _done(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        self._news.set()
        error = writing.exception()
        if error is None:
            self.core.synced()
            if not self._is_closing:
                self._look()
            return
        why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self.core.failed(why)
        if self._on_problem is not None:
            self._on_problem(why)

    async def _written(self) -> None:
        while self._writing is not None:
            await asyncio.wait([self._writing])
            await asyncio.sleep(0)  # its callback comes in the same turn

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """In the disk's thread."""
        for effect in effects:
            match effect:
                case Begin(segment):
                    self._file.begin(segment)
                case Write(content):
                    self._file.write(content)
                case FinishSegment(segment):
                    self._file.close()
                    self._packer.submit(self._pack, segment)

    def _pack(self, segment: int) -> None:
        """In the packer's thread."""
        settings = self._settings
        try:
            pack(self.directory, segment)
            if settings.keep_bytes or settings.keep_s:
                oldest_s = time.time() - settings.keep_s if settings.keep_s else 0.0
                retain(self.directory, settings.keep_bytes, oldest_s)
        except (OSError, JournalError):
            self.n_unpacked += 1

    def _release(self) -> None:
        self._disk.shutdown()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
