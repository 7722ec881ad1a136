"""Writes a router's turns into a journal, so that a fresh core can be made to repeat them.

Spec: docs/journal.md, "Turns".
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from rolloutbus.bus.streams.tap import Outcome, Stimulus
from rolloutbus.bus.wire.entry import NO_ATTEMPT
from rolloutbus.bus.wire.errors import BusError
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.format import JournalFull
from rolloutbus.replay.journal.records import LostRecord, Record, Router, TurnRecord
from rolloutbus.replay.journal.writer import JournalWriter

FILTER = "turns of a router"
"""What the journal's segments say they hold."""


RETRY_S = 10.0
"""Between two looks whether a disk that was full has room again."""


class TurnWriter:
    """Writes a router's turns to its journal. An async context manager.

    It never waits: what the disk does not take in time is missing, and is said to be. On a full
    disk the router goes on without a journal, and the journal goes on when there is room.
    """

    def __init__(
        self,
        directory: Path,
        program: str,
        on_news: Callable[[str], None],
        settings: JournalSettings | None = None,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        """`program`: version of what runs; `on_news` gets sentences about missing turns.

        `retry_s`: seconds until a disk that was full is tried again.
        """
        self._directory = directory
        self._settings = settings
        self._program = program
        self._on_news = on_news
        self._retry_s = retry_s
        self._journal: JournalWriter | None = None
        self._ended_journal: JournalWriter | None = None
        """On a full disk: to be closed before the next one is opened."""
        self._reopening: asyncio.Task[None] | None = None
        self._is_slow = False
        self._is_closing = False
        self._n = 0
        self._n_missing = 0
        """Records that came since the journal ended."""

    async def __aenter__(self) -> Self:
        """Begin; on a full disk that is put off. Otherwise it raises as `JournalWriter`."""
        try:
            self._journal = await self._opened()
        except JournalFull as error:
            self._say_hole(str(error))
            self._reopen_later()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the journal: recorded turns are durable afterwards, if the disk had room."""
        self._is_closing = True
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait([self._reopening])
        for journal in (self._ended_journal, self._journal):
            if journal is not None:
                await journal.__aexit__(None, None, None)

    def began(self, settings: msgspec.Struct, instance: str, tap: str) -> None:
        """Records the start of a fresh core."""
        text = msgspec.json.encode(settings).decode()
        self._n = 0
        self._append(lambda seq, at: Router(seq, at, self._program, text, instance, tap))

    def turn(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """One turn of that core."""
        n, self._n = self._n, self._n + 1
        self._append(lambda seq, at: TurnRecord(seq, at, n, stimulus, outcome))

    def _append(self, build: Callable[[int, int], Record]) -> None:
        if self._journal is None:
            self._n_missing += 1
        elif not self._journal.append(build) and not self._is_slow:
            self._is_slow = True
            self._on_news("the router's journal has a hole: the disk is too slow")

    async def _opened(self) -> JournalWriter:
        journal = JournalWriter(
            self._directory, self._settings, filter_text=FILTER, on_problem=self._ended
        )
        return await journal.__aenter__()

    def _ended(self, why: str) -> None:
        """Handles a disk that accepts no more data: reports the hole, and tries again later."""
        assert self._journal is not None
        if self._is_closing:
            self._on_news(f"the router's journal lacks its end: {why}")
            return
        self._say_hole(why)
        self._n_missing += self._journal.core.next_seq - 1 - self._journal.core.durable
        self._ended_journal, self._journal = self._journal, None
        self._reopen_later()

    def _say_hole(self, why: str) -> None:
        self._on_news(
            f"the router's journal has a hole from now on: {why}; the router goes on without it, "
            f"and tries again every {self._retry_s:g} s"
        )

    def _reopen_later(self) -> None:
        self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        if self._ended_journal is not None:
            await self._ended_journal.__aexit__(None, None, None)
            self._ended_journal = None
        while True:
            await asyncio.sleep(self._retry_s)
            try:
                journal = await self._opened()
            except BusError:
                continue
            break
        n, self._n_missing = self._n_missing, 0
        journal.append(lambda seq, at: LostRecord(seq, at, "memory", "", NO_ATTEMPT, 0, n))
        self._journal, self._is_slow = journal, False
        self._on_news(f"the router's journal goes on; {n:,} turns before that are missing")
