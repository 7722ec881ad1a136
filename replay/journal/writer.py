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
from typing import Self

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.replay.journal.core import (
    Begin,
    Effect,
    FinishSegment,
    JournalCore,
    JournalIdentity,
    Write,
)
from rolloutbus.replay.journal.files import JournalSegment, lock, pack, retain, unusable
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.records import Record
from rolloutbus.replay.journal.recovery import Recovered, recover
from rolloutbus.replay.journal.settings import JournalSettings


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
        """`on_problem` is told, once, why nothing is recorded any more."""
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
        try:
            # In the disk's thread: somebody may be served meanwhile.
            found = await self._loop.run_in_executor(self._disk, self._begin)
        except OSError as error:
            self._file.close()
            self._release()
            raise unusable(self.directory, error) from error
        except BusError:
            self._release()
            raise
        self._core.synced()
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
        self._write(self._core.close(now_ns()))
        await self._written()
        self._file.close()
        await self._loop.run_in_executor(None, self._packer.shutdown)
        self._release()

    @property
    def durable(self) -> int:
        """Records up to this number survive the end of this machine; -1: none yet."""
        return self._core.durable

    @property
    def next_seq(self) -> int:
        """Number of the record that comes next."""
        return self._core.next_seq

    @property
    def n_dropped(self) -> int:
        """Messages that had no room in memory, because the disk is slow."""
        return self._core.n_dropped

    @property
    def problem(self) -> str:
        """Why nothing is recorded any more; empty while all is well."""
        return self._core.problem

    def append(self, build: Callable[[int, int], Record]) -> bool:
        """Take the record that `build` makes of its number and the time; False if it is lost."""
        now = now_ns()
        was_taken = self._core.append(lambda seq: build(seq, now), now)
        if self._writing is None:
            self._arm()
        return was_taken

    async def sync(self) -> None:
        """Wait until everything that was appended so far is durable.

        Raises:
            JournalError: it never will be.
        """
        last = self.next_seq - 1
        while self.durable < last:
            if self.problem:
                raise JournalError(self.problem)
            self._news.clear()
            await self._news.wait()

    def _begin(self) -> Recovered:
        self._lock = lock(self.directory)
        found = recover(self.directory, now_ns())
        self._core = self._core_after(found)
        self.cut_bytes = found.cut_bytes
        self._carry_out(self._core.start(now_ns(), time.time_ns()))
        return found

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
        if self._is_closing or self._core.problem:
            return
        at = self._loop.time() + self._core.due_in_s(now_ns())
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
            self._write(self._core.due(now_ns(), time.time_ns()))
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
            self._core.synced()
            if not self._is_closing:
                self._look()
            return
        why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self._core.failed(why)
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
