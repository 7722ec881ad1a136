"""Has fresh router cores repeat the turns of a journal, and compares what they want.

Pure. Which core that is, the caller says. Spec: docs/journal.md, "Turns".
"""

from collections.abc import Callable
from typing import NamedTuple, cast

from rolloutbus.bus.streams.tap import Outcome, Stimulus
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.membership import Hello
from rolloutbus.replay.journal.records import Head, Record, Router, TurnRecord

Repeat = Callable[[Stimulus], Outcome]
"""Tells a core what another one was told."""
Begin = Callable[[Router], Repeat]
"""Makes a fresh core."""


class Divergence(NamedTuple):
    """A turn of which something else came than is recorded."""

    router: int
    """Which one in the journal, from 1."""
    turn: TurnRecord
    got: Outcome
    since_s: float
    """Since the first turn of its router, by that one's clock."""
    wall_ns: int
    """Unix time when it was recorded, nanoseconds."""


class CorePlayer:
    """Takes the records of one journal, in order."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._repeat: Repeat | None = None
        self._next = 0
        self._began_at = 0.0
        self._wall_minus_boot_ns = 0
        self.n_routers = 0
        self.n_turns = 0
        """That were repeated."""
        self.n_different = 0
        """Of them; all but the first may follow from it."""
        self.n_unplayable = 0
        """They come after a hole, or after the end of the core that should repeat them."""
        self.first: Divergence | None = None
        self.crashes: list[str] = []
        """What ended routers then, in order."""
        self.names: dict[bytes, str] = {}
        """Who said to be at a connection."""

    @property
    def is_same(self) -> bool:
        """Whether every turn was repeated and led to the same."""
        return self.n_turns > 0 and not self.n_different and not self.n_unplayable

    def play(self, record: Record) -> None:
        """One more record; other kinds than turns are passed over.

        Raises:
            JournalError: a core like the recorded one cannot be made here.
        """
        if isinstance(record, Head):
            self._wall_minus_boot_ns = record.wall_ns - record.at_ns
        elif isinstance(record, Router):
            self.n_routers += 1
            self._next = 0
            self._repeat = self._begin(record)
        elif isinstance(record, TurnRecord):
            self._turn(record)

    def _turn(self, turn: TurnRecord) -> None:
        self._note_names(turn.stimulus)
        if turn.outcome.crash:
            self.crashes.append(turn.outcome.crash)
        if self._repeat is None or turn.n != self._next:
            self._repeat = None  # what a core does next depends on all that it was told before
            self.n_unplayable += 1
            return
        if not self._next:
            self._began_at = turn.stimulus.at
        self._next += 1
        self.n_turns += 1
        got = self._repeat(turn.stimulus)
        if got.crash:
            self._repeat = None
        if got == turn.outcome:
            return
        self.n_different += 1
        if self.first is None:
            since_s = turn.stimulus.at - self._began_at
            wall_ns = turn.at_ns + self._wall_minus_boot_ns
            self.first = Divergence(self.n_routers, turn, got, since_s, wall_ns)

    def _note_names(self, stimulus: Stimulus) -> None:
        for entry in stimulus.entries:
            if entry.kind == "hello":
                try:
                    self.names[stimulus.peers[0]] = cast("Hello", unpack(entry)).name
                except (RemoteProtocolError, IndexError):
                    continue
