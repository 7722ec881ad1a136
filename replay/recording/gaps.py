"""What a recorder has missed of each stream: numbers that are not there, or begin too late.

Pure. Times are nanoseconds. Spec: docs/journal.md, "lost".
"""

from collections import OrderedDict
from typing import NamedTuple, cast

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES, GapTracker, Span
from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Attempt, Entry
from rolloutbus.bus.wire.messages.generation import Generate, Generated
from rolloutbus.bus.wire.messages.stream import Deltas, Idle
from rolloutbus.replay.journal.records import LostSource

MAX_ATTEMPTS = 100_000
"""Followed at once; the oldest are forgotten."""
LAST_ROW_NS = 3_000_000_000
"""After its result the last row of a stream is waited for as long as this."""


class RecordingGap(NamedTuple):
    """What is missing."""

    source: LostSource
    name: str
    attempt: Attempt
    first: int
    n_missing: int


class _Progress:
    """One attempt, as far as it was heard."""

    __slots__ = ("base", "due_ns", "first", "has_ended", "n_result", "numbers")

    def __init__(self) -> None:
        self.base: int | None = None
        """Where its first row begins; None while nobody has said."""
        self.first: int | None = None
        """Where the first row began that came."""
        self.numbers = GapTracker()
        self.has_ended = False
        """Its last row has come."""
        self.n_result: int | None = None
        self.due_ns = 0


class StreamGaps:
    """Follows the tokens of every attempt."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[tuple[str, Attempt], _Progress] = OrderedDict()
        self._ended: OrderedDict[tuple[str, Attempt], None] = OrderedDict()

    @property
    def awaits_rows(self) -> bool:
        """Whether a result came whose last row did not."""
        attempts = (self._attempts.get(key) for key in self._ended)
        return any(each is not None and not each.has_ended for each in attempts)

    def published(self, entry: Entry) -> list[RecordingGap]:
        """What a worker has published.

        Raises:
            RemoteProtocolError: its body breaks its type.
        """
        found: list[RecordingGap] = []
        if entry.kind == "deltas":
            deltas = cast("Deltas", unpack(entry))
            last = {row for row, _ in deltas.finishes}
            rows = zip(deltas.rids, deltas.attempts, deltas.seqs, deltas.counts, strict=False)
            for row, (rid, attempt, seq, count) in enumerate(rows):
                found += self._row((rid, attempt), seq, count, is_last=row in last)
        elif entry.kind == "idle":
            idle = cast("Idle", unpack(entry))
            for rid, attempt, n in zip(idle.rids, idle.attempts, idle.n_tokens, strict=False):
                progress = self._attempts.get((rid, attempt))
                if progress is not None and progress.first is not None:
                    found += self._row((rid, attempt), n, 0, is_last=False)
        return found

    def sent(self, entry: Entry) -> list[RecordingGap]:
        """A `generate` on its way to a worker: says where its rows begin.

        Raises:
            RemoteProtocolError: its body breaks its type.
        """
        prefix = cast("Generate", unpack(entry)).prefix
        progress = self._of((entry.rid, entry.attempt))
        if progress.base is not None:
            return []
        progress.base = len(prefix.tokens) // TOKEN_BYTES if prefix is not None else 0
        if progress.first is not None and progress.first > progress.base:
            span = Span(progress.base, progress.first)
            return _gaps((entry.rid, entry.attempt), span)
        progress.numbers.pass_over(progress.base, progress.base)
        return []

    def finished(self, entry: Entry, now_ns: int) -> None:
        """An ending from a worker: its stream ends soon.

        Raises:
            RemoteProtocolError: its body breaks its type.
        """
        key = (entry.rid, entry.attempt)
        progress = self._attempts.get(key)
        if progress is None or progress.n_result is not None:
            return
        n_result = progress.numbers.next
        if entry.kind == "finished":
            result = cast("Generated", unpack_result("generate", entry))
            n_result = len(result.tokens) // TOKEN_BYTES
        progress.n_result, progress.due_ns = n_result, now_ns + LAST_ROW_NS
        self._ended[key] = None

    def tick(self, now_ns: int) -> list[RecordingGap]:
        """Streams whose last rows are overdue."""
        found: list[RecordingGap] = []
        while self._ended:
            key = next(iter(self._ended))
            progress = self._attempts.get(key)
            if progress is not None and progress.due_ns > now_ns and not progress.has_ended:
                break
            del self._ended[key]
            if progress is not None:
                del self._attempts[key]
                is_known = progress.base is not None or progress.first is not None
                if is_known and progress.n_result is not None:
                    span = progress.numbers.pass_over(progress.n_result, progress.n_result)
                    found += _gaps(key, span)
        return found

    def _row(
        self, key: tuple[str, Attempt], seq: int, count: int, *, is_last: bool
    ) -> list[RecordingGap]:
        progress = self._of(key)
        progress.has_ended |= is_last
        if progress.first is None:
            progress.first = seq
            if progress.base is None:  # where it begins is known by nobody yet
                progress.numbers = GapTracker(seq)
        return _gaps(key, progress.numbers.pass_over(seq, seq + count))

    def _of(self, key: tuple[str, Attempt]) -> _Progress:
        progress = self._attempts.get(key)
        if progress is None:
            progress = self._attempts[key] = _Progress()
            if len(self._attempts) > MAX_ATTEMPTS:
                gone, _ = self._attempts.popitem(last=False)
                self._ended.pop(gone, None)
        return progress


def _gaps(key: tuple[str, Attempt], span: Span | None) -> list[RecordingGap]:
    return (
        [] if span is None else [RecordingGap("stream", *key, span.start, span.stop - span.start)]
    )


def is_generate_to_worker(event: str, entry: Entry) -> bool:
    """Whether it tells where the rows of an attempt begin."""
    return event == "sent" and entry.kind == "generate" and entry.attempt != NO_ATTEMPT
