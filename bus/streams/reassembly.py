"""Putting the tokens of one request together from stream rows that may be lost or repeated.

What is held is always contiguous from the first generated token; a row beyond it waits until a
repair has closed the gap. Spec: docs/protocol.md, "Streams".
"""

from typing import NamedTuple

from rolloutbus.bus.wire.messages.generation import Prefix, VersionRuns

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


class Assembly:
    """The contiguous tokens of one request, across its attempts."""

    __slots__ = (
        "_behaviour",
        "_early",
        "_has_behaviour",
        "_logprobs",
        "_runs",
        "_tokens",
        "n_delivered",
        "n_repairs",
        "n_tokens",
    )

    def __init__(self) -> None:
        self._tokens = bytearray()
        self._logprobs = bytearray()
        self._behaviour = bytearray()
        self._has_behaviour = False
        self._runs: VersionRuns = []
        self._early: list[Row] = []
        self.n_tokens = 0
        """Contiguous tokens held."""
        self.n_delivered = 0
        """Of these, handed to the reader of the stream."""
        self.n_repairs = 0
        """Repairs asked for in this attempt."""

    @property
    def has_gap(self) -> bool:
        """Whether rows wait for tokens before them."""
        return bool(self._early)

    def begin(self, base: int) -> None:
        """A new attempt goes on after `base` tokens; what lies beyond is not its work."""
        self._early.clear()
        self.n_repairs = 0
        self.cut(base)

    def cut(self, n_tokens: int) -> None:
        """Forget everything from token `n_tokens` on."""
        if n_tokens >= self.n_tokens:
            return
        n_bytes = n_tokens * TOKEN_BYTES
        del self._tokens[n_bytes:], self._logprobs[n_bytes:], self._behaviour[n_bytes:]
        self._runs = cut_runs(self._runs, 0, n_tokens)
        self.n_tokens = n_tokens
        self.n_delivered = min(self.n_delivered, n_tokens)

    def add(self, row: Row) -> bool:
        """Take a row in; False if tokens before it are missing."""
        if row.start == self.n_tokens:
            self._append(row)
        elif row.start > self.n_tokens:
            if len(self._early) < MAX_EARLY_ROWS:
                self._early.append(row)
            return False
        else:
            self._overlap(row)
        if self._early:
            self._add_early()
        return True

    def read(self) -> list[Row]:
        """What is held and was not delivered yet, a row per version; now it is delivered."""
        found: list[Row] = []
        start = self.n_delivered
        for version, n_tokens in cut_runs(self._runs, start, self.n_tokens):
            part = slice(start * TOKEN_BYTES, (start + n_tokens) * TOKEN_BYTES)
            found.append(
                Row(
                    start,
                    bytes(self._tokens[part]),
                    bytes(self._logprobs[part]),
                    [(version, n_tokens)],
                    bytes(self._behaviour[part]) if self._has_behaviour else b"",
                )
            )
            start += n_tokens
        self.n_delivered = start
        return found

    def prefix(self) -> Prefix:
        """Everything held, for a worker to go on after."""
        return Prefix(
            tokens=bytes(self._tokens),
            logprobs=bytes(self._logprobs),
            versions=list(self._runs),
            behaviour_logprobs=bytes(self._behaviour) if self._has_behaviour else b"",
        )

    def agrees_with(self, tokens: bytes) -> bool:
        """Whether what is held is the beginning of a result's tokens, int32 [n]."""
        return tokens.startswith(self._tokens)

    def replace(self, row: Row) -> bool:
        """Hold exactly the tokens of a result, `row.start` 0; False if others were held."""
        n_same = first_difference(self._tokens, row.tokens)
        is_same = n_same == self.n_tokens
        n_delivered = min(self.n_delivered, n_same)
        self._early.clear()
        self.cut(0)
        self._append(row)
        self.n_delivered = n_delivered
        return is_same

    def _append(self, row: Row) -> None:
        self._tokens += row.tokens
        self._logprobs += row.logprobs
        self._behaviour += row.behaviour_logprobs or row.logprobs
        self._has_behaviour |= bool(row.behaviour_logprobs)
        self.n_tokens = row.end
        runs = self._runs
        for version, n_tokens in row.versions:
            if not n_tokens:
                continue  # a row that only says that the request has ended
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + n_tokens)
            else:
                runs.append((version, n_tokens))

    def _overlap(self, row: Row) -> None:
        """Tokens held already are kept, unless the row contradicts them: then they were void."""
        held = self._tokens[row.start * TOKEN_BYTES : row.end * TOKEN_BYTES]
        n_same = first_difference(held, row.tokens)
        if n_same < len(held) // TOKEN_BYTES:
            self.cut(row.start + n_same)
        if row.end > self.n_tokens:
            self._append(row.after(self.n_tokens - row.start))

    def _add_early(self) -> None:
        waiting, self._early = sorted(self._early), []
        for row in waiting:
            if row.start > self.n_tokens:
                self._early.append(row)
            elif row.end > self.n_tokens:
                self._append(row.after(self.n_tokens - row.start))
