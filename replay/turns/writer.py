"""Writes a router's turns into a journal, so that a fresh core can be made to repeat them.

Spec: docs/journal.md, "Turns".
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from bus.stimulus import Outcome, Stimulus
from replay.journal.records import Router, Turn
from replay.journal.settings import JournalSettings
from replay.journal.writer import JournalWriter

FILTER = "turns of a router"
"""What the journal's segments say they hold."""


class TurnWriter:
    """Keeps what a router tells it. An async context manager.

    It never waits: what the disk does not take in time is missing, and is said to be.
    """

    def __init__(
        self,
        directory: Path,
        program: str,
        on_problem: Callable[[str], None],
        settings: JournalSettings | None = None,
    ) -> None:
        """`program`: version of what runs; `on_problem` is told, once, why turns are missing."""
        self.journal = JournalWriter(
            directory, settings, filter_text=FILTER, on_problem=self._complain
        )
        self._program = program
        self._on_problem = on_problem
        self._has_complained = False
        self._n = 0

    async def __aenter__(self) -> Self:
        """Begin; raises as `JournalWriter`."""
        await self.journal.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """What was told is durable afterwards."""
        await self.journal.__aexit__(None, None, None)

    def began(self, settings: msgspec.Struct, instance: str, tap: str) -> None:
        """A core that knows nothing yet."""
        text = msgspec.json.encode(settings).decode()
        self._n = 0
        self.journal.append(lambda seq, at: Router(seq, at, self._program, text, instance, tap))

    def turn(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """One turn of that core."""
        n, self._n = self._n, self._n + 1
        if not self.journal.append(lambda seq, at: Turn(seq, at, n, stimulus, outcome)):
            self._complain("the disk is too slow")

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._on_problem(why)
