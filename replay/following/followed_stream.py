"""One request's stream as a subscriber holds it: its tokens, what is missing, what was told.

Pure. Spec: docs/protocol.md, "Streams".
"""

import sys
from collections.abc import Iterator

import numpy as np

from rolloutbus.bus.streams.reassembly import Assembly, Row
from rolloutbus.bus.wire.ids import Attempt
from rolloutbus.bus.wire.messages.generation import FinishReason, VersionRuns
from rolloutbus.replay.following.stream_events import Finished, GapLost, Tokens

MAX_EARLY_ROWS = 4096
"""Rows kept while a gap is open; the repair brings what is dropped beyond that."""


class _Part:
    """Contiguous tokens, after a hole or from the beginning."""

    __slots__ = ("assembly", "hole", "is_told", "start")

    def __init__(self, start: int, hole: GapLost | None = None) -> None:
        self.start = start
        self.assembly = Assembly()
        """Its indices begin at `start`."""
        self.hole = hole
        """What is lost before it."""
        self.is_told = hole is None

    @property
    def end(self) -> int:
        return self.start + self.assembly.n_tokens

    def add(self, row: Row) -> None:
        if not self.start:
            self.assembly.add(row)
        elif row.end >= self.start:
            row = row.after(max(0, self.start - row.start))
            self.assembly.add(row._replace(start=row.start - self.start))


class FollowedStream:
    """Rows of one request, over all attempts at it."""

    __slots__ = (
        "_early",
        "_early_stop",
        "_n_early",
        "_parts",
        "attempt",
        "finish_reason",
        "found",
        "heard_at",
        "is_asked_for",
        "is_doubted",
        "is_ended",
        "is_hidden",
        "is_over",
        "known",
        "n_excused",
        "n_held_bytes",
        "n_tries",
        "n_waiting_bytes",
        "rid",
        "topic",
        "worker",
    )

    def __init__(self, rid: str, attempt: Attempt, worker: str, topic: bytes) -> None:
        self.rid = rid
        self.attempt = attempt
        self.worker = worker
        self.topic = topic
        self.heard_at = 0.0
        self.known = 0
        """Tokens that there are, as far as was heard."""
        self.finish_reason: FinishReason | None = None
        self.is_over = False
        """The attempt has ended, as its last row says or as nobody speaks of it any more."""
        self.is_doubted = False
        """What is held is of an earlier attempt, and not all of it need count."""
        self.is_asked_for = False
        """It was silent, and its worker was asked whether it is there."""
        self.is_hidden = False
        """Nobody knows yet whether it is wanted."""
        self.is_ended = False
        """It is complete, and only waits to be told."""
        self.found: tuple[int, int] | None = None
        """The gap that was told."""
        self.n_tries = 0
        """Repairs that brought nothing."""
        self.n_excused = 0
        """Untold tokens that do not count as waiting."""
        self.n_held_bytes = self.n_waiting_bytes = 0
        """As its owner has counted them."""
        self._parts = [_Part(0)]
        self._early: list[Row] = []
        """Rows behind a gap: so many tokens, the first at `_early_stop`."""
        self._n_early, self._early_stop = 0, sys.maxsize

    @property
    def n_tokens(self) -> int:
        """Index after the last token held in order."""
        return self._parts[-1].end

    @property
    def n_held(self) -> int:
        """Tokens held, those behind a gap included."""
        parts = self._parts
        if len(parts) == 1:  # nearly always
            return parts[0].assembly.n_tokens + self._n_early
        return sum(part.assembly.n_tokens for part in parts) + self._n_early

    @property
    def n_untold(self) -> int:
        """Of these, not told yet."""
        parts = self._parts
        if len(parts) == 1:
            assembly = parts[0].assembly
            return assembly.n_tokens - assembly.n_delivered
        return sum(part.assembly.n_tokens - part.assembly.n_delivered for part in parts)

    @property
    def gap(self) -> tuple[int, int] | None:
        """The first range of tokens that are missing."""
        start = 0 if self.is_doubted else self.n_tokens
        if start >= self.known:
            return None
        return start, min(self.known, self._early_stop)

    def begin(self, attempt: Attempt, worker: str, start: int) -> None:
        """Another execution, the first row of which that was heard begins at `start`."""
        self.attempt, self.worker = attempt, worker
        self.known = self.n_tries = 0
        self.finish_reason, self.is_over = None, False
        self.found = None
        self._early.clear()
        self._count_early()
        if start == 0:
            self._restart()
        self.is_doubted = start > 0 and (self.n_tokens > 0 or len(self._parts) > 1)

    def add(self, row: Row) -> None:
        """A row of the present attempt."""
        self.known = max(self.known, row.end)
        if self.is_doubted or row.start > self.n_tokens:
            if row.tokens and len(self._early) < MAX_EARLY_ROWS:
                self._early.append(row)
                self._early_stop = min(self._early_stop, row.start)
                self._n_early += row.end - row.start
            return
        self._parts[-1].add(row)
        if self._early:
            self._add_early()

    def repaired(self, row: Row) -> None:
        """What the worker has of the present attempt, from `row.start` on."""
        self.known = max(self.known, row.end)
        if self.is_doubted and row.start == 0:
            self.is_doubted = False
            if len(self._parts) > 1:
                self._parts = [_Part(0)]
            self._parts[0].assembly.replace(row)
            self._add_early()
        else:
            self.add(row)

    def lose(self, why: str) -> None:
        """The gap will not be closed: go on behind it."""
        gap = self.gap
        if gap is None:
            return
        start, stop = gap
        if self.is_doubted:  # what is held below is nobody's word either
            self._restart()
            self.is_doubted = False
        hole = GapLost(self.rid, self.attempt, self.worker, start, stop, why)
        self._parts.append(_Part(stop, hole))
        self._add_early()

    def read(self) -> Iterator[Tokens | GapLost]:
        """What was not told yet, in order; now it is."""
        for part in self._parts:
            if not part.is_told and part.hole is not None:
                part.is_told = True
                yield part.hole
            for row in part.assembly.read():
                yield self._tokens(row, part.start)

    def holes(self) -> list[GapLost]:
        """What is lost and was not told yet; now it is."""
        untold = [part for part in self._parts if not part.is_told]
        for part in untold:
            part.is_told = True
        return [part.hole for part in untold if part.hole is not None]

    def result(self) -> Finished:
        """All that is held."""
        prefixes = [part.assembly.prefix() for part in self._parts]
        logprobs = b"".join(each.logprobs for each in prefixes)
        behaviour = b"".join(each.behaviour_logprobs or each.logprobs for each in prefixes)
        holes = [part.hole for part in self._parts if part.hole is not None]
        return Finished(
            rid=self.rid,
            attempt=self.attempt,
            worker=self.worker,
            finish_reason=self.finish_reason,
            tokens=np.frombuffer(b"".join(each.tokens for each in prefixes), "<i4"),
            logprobs=np.frombuffer(logprobs, "<f4"),
            behaviour_logprobs=np.frombuffer(behaviour, "<f4"),
            version_runs=_joined([run for each in prefixes for run in each.versions]),
            n_missing=sum(hole.stop - hole.start for hole in holes),
        )

    def _tokens(self, row: Row, offset: int) -> Tokens:
        logprobs = np.frombuffer(row.logprobs, "<f4")
        behaviour = row.behaviour_logprobs
        return Tokens(
            rid=self.rid,
            attempt=self.attempt,
            worker=self.worker,
            start=offset + row.start,
            tokens=np.frombuffer(row.tokens, "<i4"),
            logprobs=logprobs,
            behaviour_logprobs=np.frombuffer(behaviour, "<f4") if behaviour else logprobs,
            version=row.versions[0][0],
        )

    def _restart(self) -> None:
        if len(self._parts) > 1:
            self._parts = [_Part(0)]
        self._parts[0].assembly.begin(0)

    def _add_early(self) -> None:
        waiting, self._early = sorted(self._early), []
        for row in waiting:
            if row.start > self.n_tokens:
                self._early.append(row)
            elif row.end > self.n_tokens:
                self._parts[-1].add(row.after(self.n_tokens - row.start))
        self._count_early()

    def _count_early(self) -> None:
        self._n_early = sum(row.end - row.start for row in self._early)
        self._early_stop = min((row.start for row in self._early), default=sys.maxsize)


def _joined(runs: VersionRuns) -> VersionRuns:
    joined: VersionRuns = []
    for version, n_tokens in runs:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + n_tokens)
        else:
            joined.append((version, n_tokens))
    return joined
