"""One request's stream as a subscriber holds it: tokens, gaps, and what the reader got.

Pure. Spec: docs/protocol.md, "Streams".
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rolloutbus.bus.streams.reassembly import Assembly, Row
from rolloutbus.bus.wire.entry import Attempt
from rolloutbus.bus.wire.messages.generation import FinishReason
from rolloutbus.replay.stream.events import Finished, GapLost, Tokens


@dataclass(slots=True, eq=False)
class FollowedStream:
    """Rows of one request, over all attempts at it."""

    rid: str
    attempt: Attempt
    worker: str
    topic: bytes
    heard_at: float = 0.0
    assembly: Assembly = field(default_factory=Assembly)
    finish_reason: FinishReason | None = None
    is_over: bool = False
    """The attempt has ended, as its last row says or as no worker speaks of it any more."""
    is_asked_for: bool = False
    """It was silent, and its worker was asked whether it is there."""
    is_hidden: bool = False
    """It is not known yet whether it is wanted."""
    is_ended: bool = False
    """It is complete, and only waits to be told."""
    found: tuple[int, int] | None = None
    """The gap that the reader was notified of."""
    n_tries: int = 0
    """Repairs that brought nothing."""
    n_excused: int = 0
    """Untold tokens that do not count as waiting."""
    n_held_bytes: int = 0
    n_waiting_bytes: int = 0
    """As its owner has counted them."""
    _holes: list[GapLost] = field(default_factory=list[GapLost])
    _n_holes_told: int = 0

    @property
    def n_held(self) -> int:
        """Tokens held, those behind a gap included."""
        return self.assembly.n_tokens + self.assembly.n_early

    @property
    def n_untold(self) -> int:
        """Tokens held in order that the reader has not got yet."""
        return self.assembly.n_tokens - self.assembly.n_delivered

    def begin(self, attempt: Attempt, worker: str, start: int) -> None:
        """Another execution, the first row of which that was heard begins at `start`."""
        self.attempt, self.worker = attempt, worker
        self.n_tries = 0
        self.finish_reason, self.is_over = None, False
        self.found = None
        if start:
            self.assembly.doubt()
        else:
            self.assembly.begin(0)
            self._forget_holes()

    def repaired(self, row: Row) -> None:
        """What the worker has of the present attempt, from `row.start` on."""
        self.assembly.repaired(row)
        if not self.assembly.n_lost:
            self._forget_holes()

    def lose(self, why: str) -> int:
        """The gap will not be closed: go on behind it. Returns how many tokens that costs."""
        was_doubted = self.assembly.is_doubted
        gap = self.assembly.give_up()
        if gap is None:
            return 0
        if was_doubted:
            self._forget_holes()
        self._holes.append(GapLost(self.rid, self.attempt, self.worker, *gap, why))
        return gap.stop - gap.start

    def read(self) -> Iterator[Tokens | GapLost]:
        """Yields what the reader has not got yet, in order, and marks it as read."""
        holes = self.holes()
        for row in self.assembly.read():
            while holes and holes[0].start <= row.start:
                yield holes.pop(0)
            yield self._tokens(row)
        yield from holes

    def holes(self) -> list[GapLost]:
        """Returns the lost gaps that the reader has not got yet, and marks them as read."""
        untold = self._holes[self._n_holes_told :]
        self._n_holes_told = len(self._holes)
        return untold

    def result(self) -> Finished:
        """All that is held."""
        held = self.assembly.prefix()
        return Finished(
            rid=self.rid,
            attempt=self.attempt,
            worker=self.worker,
            finish_reason=self.finish_reason,
            tokens=np.frombuffer(held.tokens, "<i4"),
            logprobs=np.frombuffer(held.logprobs, "<f4"),
            behaviour_logprobs=np.frombuffer(held.behaviour_logprobs or held.logprobs, "<f4"),
            version_runs=held.versions,
            n_missing=self.assembly.n_lost,
        )

    def _tokens(self, row: Row) -> Tokens:
        logprobs = np.frombuffer(row.logprobs, "<f4")
        behaviour = row.behaviour_logprobs
        return Tokens(
            rid=self.rid,
            attempt=self.attempt,
            worker=self.worker,
            start=row.start,
            tokens=np.frombuffer(row.tokens, "<i4"),
            logprobs=logprobs,
            behaviour_logprobs=np.frombuffer(behaviour, "<f4") if behaviour else logprobs,
            version=row.versions[0][0],
        )

    def _forget_holes(self) -> None:
        self._holes.clear()
        self._n_holes_told = 0
