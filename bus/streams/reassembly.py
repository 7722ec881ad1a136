"""Numbered streams put together again, though messages of them may be lost, repeated or late.

`GapTracker` counts; recorders need no more. `Assembly` also holds the tokens of one request for
clients and subscribers. Pure. Spec: docs/protocol.md, "Streams".
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from rolloutbus.bus.wire.entry import Attempt
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Deltas, Prefix, Repaired, VersionRuns

TOKEN_BYTES = 4
"""Tokens are int32, logprobs float32, both little endian."""
MAX_EARLY_ROWS = 4096
"""Rows kept while a gap is open; the repair brings what is dropped beyond that."""


class Row(NamedTuple):
    """Consecutive tokens of one request."""

    start: int
    """Index of the first token in the request."""
    tokens: bytes
    """int32 [k]."""
    logprobs: bytes
    """float32 [k]."""
    versions: VersionRuns
    behaviour_logprobs: bytes = b""
    """float32 [k]; empty: equal to `logprobs`."""

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + len(self.tokens) // TOKEN_BYTES

    def after(self, n_tokens: int) -> "Row":
        """Without its first `n_tokens` tokens."""
        cut = n_tokens * TOKEN_BYTES
        return Row(
            self.start + n_tokens,
            self.tokens[cut:],
            self.logprobs[cut:],
            cut_runs(self.versions, n_tokens, self.end - self.start),
            self.behaviour_logprobs[cut:],
        )


def cut_runs(runs: VersionRuns, start: int, end: int) -> VersionRuns:
    """The version runs of the tokens [start, end)."""
    found: VersionRuns = []
    at = 0
    for version, n_tokens in runs:
        n_kept = min(at + n_tokens, end) - max(at, start)
        if n_kept > 0:
            found.append((version, n_kept))
        at += n_tokens
    return found


def first_difference(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """Index of the first token in which they differ, or the length of the shorter one."""
    n_tokens = min(len(left), len(right)) // TOKEN_BYTES
    if left[: n_tokens * TOKEN_BYTES] == right[: n_tokens * TOKEN_BYTES]:
        return n_tokens
    low, high = 0, n_tokens  # the first `low` tokens are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low


class Span(NamedTuple):
    """The numbers from `start` on, before `stop`."""

    start: int
    stop: int


class GapTracker:
    """Counts a numbered stream: what has come, and what is missing."""

    __slots__ = ("known", "next")

    def __init__(self, first: int = 0) -> None:
        self.next = first
        """All numbers before this one have come, or were given up."""
        self.known = first
        """All numbers before this one exist, as far as was heard."""

    @property
    def gap(self) -> Span | None:
        """The first numbers that are missing."""
        return Span(self.next, self.known) if self.next < self.known else None

    def heard(self, stop: int) -> None:
        """All numbers before `stop` exist."""
        self.known = max(self.known, stop)

    def pass_over(self, start: int, stop: int) -> Span | None:
        """Take [start, stop) in; what is missing before it is given up, and returned."""
        self.heard(start)
        gap = self.gap
        self.next = self.known = max(self.known, stop)
        return gap


class _Hole(NamedTuple):
    """Tokens that were given up."""

    n_held: int
    """Tokens that are held before it."""
    n_lost: int
    """Tokens that were given up until its end."""


class TokenColumns:
    """Consecutive tokens of one request, with their logprobs and the versions that made them."""

    __slots__ = ("_behaviour", "_has_behaviour", "_logprobs", "runs", "tokens")

    def __init__(self) -> None:
        self.tokens = bytearray()
        """int32 [n]."""
        self._logprobs = bytearray()
        self._behaviour = bytearray()
        self._has_behaviour = False
        self.runs: VersionRuns = []

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def append(self, row: Row) -> None:
        """Go on with these tokens."""
        self.tokens += row.tokens
        self._logprobs += row.logprobs
        self._behaviour += row.behaviour_logprobs or row.logprobs
        self._has_behaviour |= bool(row.behaviour_logprobs)
        runs = self.runs
        for version, n_tokens in row.versions:
            if not n_tokens:
                continue  # a row that only says that the request has ended
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + n_tokens)
            else:
                runs.append((version, n_tokens))

    def cut(self, n_tokens: int) -> None:
        """Forget all but the first tokens."""
        n_bytes = n_tokens * TOKEN_BYTES
        del self.tokens[n_bytes:], self._logprobs[n_bytes:], self._behaviour[n_bytes:]
        self.runs = cut_runs(self.runs, 0, n_tokens)

    def part(self, start: int, stop: int) -> Row:
        """The tokens [start, stop), which are counted from the first one here."""
        part = slice(start * TOKEN_BYTES, stop * TOKEN_BYTES)
        return Row(
            start,
            bytes(self.tokens[part]),
            bytes(self._logprobs[part]),
            cut_runs(self.runs, start, stop),
            bytes(self._behaviour[part]) if self._has_behaviour else b"",
        )


class Assembly(GapTracker):
    """The tokens of one request, across its attempts: what has come in order, and early rows.

    Tokens are held up to the first gap. Rows behind it wait until a repair has closed the gap, or
    until it is given up, which leaves a hole.
    """

    __slots__ = (
        "_early",
        "_early_start",
        "_floor",
        "_held",
        "_holes",
        "is_doubted",
        "n_delivered",
        "n_early",
        "n_lost",
        "n_repairs",
    )

    def __init__(self) -> None:
        super().__init__()
        self._held = TokenColumns()
        self._holes: list[_Hole] = []
        self._floor = 0
        """Index after the last hole: nothing before it changes any more."""
        self._early: list[Row] = []
        self._early_start = sys.maxsize
        """Index of the first token of an early row."""
        self.n_early = 0
        """Tokens of early rows."""
        self.n_lost = 0
        """Tokens of holes."""
        self.n_delivered = 0
        """Tokens held, handed to the reader of the stream."""
        self.n_repairs = 0
        """Repairs asked for since one brought tokens, in this attempt."""
        self.is_doubted = False
        """What is held is of an earlier attempt, and not all of it need count."""

    @property
    def n_tokens(self) -> int:
        """Tokens held in order."""
        return self.next - self.n_lost

    @property
    def gap(self) -> Span | None:
        """The first tokens that are missing."""
        start = 0 if self.is_doubted else self.next
        return Span(start, min(self.known, self._early_start)) if start < self.known else None

    def begin(self, base: int) -> None:
        """A new attempt goes on after `base` tokens; what lies beyond is not its work."""
        self._early.clear()
        self._count_early()
        self.known = self.n_repairs = 0
        self.is_doubted = False
        self.cut(base)

    def doubt(self) -> None:
        """A new attempt goes on after tokens that are not known: ask for it from the first one."""
        self.begin(self.next)
        self.is_doubted = self.next > 0

    def cut(self, stop: int) -> None:
        """Forget everything from token `stop` on: from behind the last hole, or from 0, on."""
        if stop >= self.next:
            return
        if not stop:
            self._holes.clear()
            self._floor = self.n_lost = 0
        n_tokens = stop - self.n_lost
        self._held.cut(n_tokens)
        self.next = stop
        self.n_delivered = min(self.n_delivered, n_tokens)

    def add(self, row: Row) -> bool:
        """Take a row in; False if tokens before it are missing."""
        end = row.end
        self.known = max(self.known, end)
        if self.is_doubted or row.start > self.next:
            if row.tokens and len(self._early) < MAX_EARLY_ROWS:
                self._early.append(row)
                self._early_start = min(self._early_start, row.start)
                self.n_early += end - row.start
            return False
        if row.start == self.next:
            self._held.append(row)
            self.next = end
        elif end >= self._floor:
            self._overlap(row.after(max(0, self._floor - row.start)))
        if self._early:
            self._add_early()
        return True

    def repaired(self, row: Row) -> None:
        """Take in what the worker has of the present attempt, from `row.start` on."""
        if self.is_doubted and row.start == 0:
            self.is_doubted = False
            if self._holes:
                self.cut(0)
            self.heard(row.end)
            self._hold(row)
            self._add_early()
        else:
            self.add(row)

    def give_up(self) -> Span | None:
        """Go on behind the gap, which is returned: it will not be closed."""
        gap = self.gap
        if gap is not None:
            if self.is_doubted:  # what is held below is nobody's word either
                self.is_doubted = False
                self.cut(0)
            self.n_lost += gap.stop - gap.start
            self._holes.append(_Hole(gap.stop - self.n_lost, self.n_lost))
            self.next = self._floor = gap.stop
            self._add_early()
        return gap

    def read(self) -> list[Row]:
        """Rows that are held and were not delivered yet, one per version; now they are.

        No row goes over a hole.
        """
        found: list[Row] = []
        start = self.n_delivered
        n_lost = 0
        for hole in [*self._holes, _Hole(self.n_tokens, 0)]:
            for _, n_tokens in cut_runs(self._held.runs, start, hole.n_held):
                row = self._held.part(start, start + n_tokens)
                found.append(row._replace(start=start + n_lost))
                start += n_tokens
            n_lost = hole.n_lost
        self.n_delivered = start
        return found

    def prefix(self) -> Prefix:
        """Everything held, for a worker to go on after."""
        return Prefix(*self._held.part(0, self.n_tokens)[1:])

    def agrees_with(self, tokens: bytes) -> bool:
        """Whether what is held is the beginning of a result's tokens, int32 [n]."""
        return tokens.startswith(self._held.tokens)

    def replace(self, row: Row) -> bool:
        """Hold exactly the tokens of a result, `row.start` 0; False if others were held."""
        self._early.clear()
        self._count_early()
        self.known = row.end
        return self._hold(row)

    def _hold(self, row: Row) -> bool:
        """Hold these tokens, the first of the request and those that follow, and no others."""
        n_same = first_difference(self._held.tokens, row.tokens)
        is_same = n_same == self.n_tokens
        n_delivered = min(self.n_delivered, n_same)
        self.cut(0)
        self._append(row)
        self.n_delivered = n_delivered
        return is_same

    def _append(self, row: Row) -> None:
        self._held.append(row)
        self.next = row.end

    def _overlap(self, row: Row) -> None:
        """Tokens held already are kept, unless the row contradicts them: then they were void."""
        start, stop = row.start - self.n_lost, row.end - self.n_lost
        held = self._held.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        n_same = first_difference(held, row.tokens)
        if n_same < len(held) // TOKEN_BYTES:
            self.cut(row.start + n_same)
        if row.end > self.next:
            self._append(row.after(self.next - row.start))

    def _add_early(self) -> None:
        waiting, self._early = sorted(self._early), []
        for row in waiting:
            if row.start > self.next:
                self._early.append(row)
            elif row.end > self.next:
                self._append(row.after(self.next - row.start))
        self._count_early()

    def _count_early(self) -> None:
        self.n_early = sum(row.end - row.start for row in self._early)
        self._early_start = min((row.start for row in self._early), default=sys.maxsize)


def rows_of(deltas: Deltas) -> Iterator[tuple[str, Attempt, Row]]:
    """(rid, attempt, row) of one engine step's columns.

    Raises:
        RemoteProtocolError: the columns do not fit together.
    """
    n_rows = len(deltas.rids)
    columns = (deltas.attempts, deltas.seqs, deltas.counts, deltas.versions)
    n_bytes = TOKEN_BYTES * sum(deltas.counts)
    behaviour = deltas.behaviour_logprobs
    if (
        any(len(column) != n_rows for column in columns)
        or min(deltas.counts, default=0) < 0
        or len(deltas.tokens) != n_bytes
        or len(deltas.logprobs) != n_bytes
        or len(behaviour) not in (0, n_bytes)
    ):
        raise RemoteProtocolError("deltas: columns of unequal length")
    end = 0
    for rid, attempt, seq, count, version in zip(deltas.rids, *columns, strict=True):
        start, end = end, end + TOKEN_BYTES * count
        row = Row(
            seq,
            deltas.tokens[start:end],
            deltas.logprobs[start:end],
            [(version, count)],
            behaviour[start:end],
        )
        yield rid, attempt, row


def row_of_repaired(repaired: Repaired) -> Row | None:
    """The row of a repair; None if its columns do not fit together."""
    n_bytes = TOKEN_BYTES * sum(count for _, count in repaired.versions)
    sizes = {len(repaired.tokens), len(repaired.logprobs)}
    if sizes != {n_bytes} or len(repaired.behaviour_logprobs) not in (0, n_bytes):
        return None
    return Row(*msgspec.structs.astuple(repaired))
