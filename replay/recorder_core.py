"""What a recorder writes down of what it hears, and what it notices to have missed.

Pure: what comes in is a message and the time, what goes out are records without their numbers.
Spec: docs/journal.md.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES, GapTracker, Span
from rolloutbus.bus.streams.tap import TapMark, mark_in
from rolloutbus.bus.wire.codec import unpack_as, unpack_result
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Attempt, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Deltas, Generate, Generated, Idle
from rolloutbus.replay.choice import Choice, Filter
from rolloutbus.replay.journal.records import (
    LostRecord,
    LostSource,
    Record,
    Stream,
    Tap,
    ToldRecord,
)

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


@dataclass(slots=True)
class _Progress:
    """Progress of one attempt, as far as the recorder heard it."""

    base: int | None = None
    """Where its first row begins; None: not known yet."""
    first: int | None = None
    """Where the first row began that came."""
    numbers: GapTracker = field(default_factory=GapTracker)
    has_ended: bool = False
    """Its last row has come."""
    n_result: int | None = None
    due_ns: int = 0


class StreamGaps:
    """Follows the tokens of every attempt."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[tuple[str, Attempt], _Progress] = OrderedDict()
        self._ended: OrderedDict[tuple[str, Attempt], None] = OrderedDict()

    @property
    def awaits_rows(self) -> bool:
        """Whether a result arrived without the last row of its stream."""
        attempts = (self._attempts.get(key) for key in self._ended)
        return any(each is not None and not each.has_ended for each in attempts)

    def published(self, entry: Entry) -> list[RecordingGap]:
        """What a worker has published. Raises RemoteProtocolError: its body breaks its type."""
        found: list[RecordingGap] = []
        if entry.kind == "deltas":
            deltas = unpack_as(Deltas, entry)
            last = {row for row, _ in deltas.finishes}
            rows = zip(deltas.rids, deltas.attempts, deltas.seqs, deltas.counts, strict=False)
            for row, (rid, attempt, seq, count) in enumerate(rows):
                found += self._row((rid, attempt), seq, count, is_last=row in last)
        elif entry.kind == "idle":
            idle = unpack_as(Idle, entry)
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
        prefix = unpack_as(Generate, entry).prefix
        progress = self._of((entry.rid, entry.attempt))
        if progress.base is not None:
            return []
        progress.base = len(prefix.tokens) // TOKEN_BYTES if prefix is not None else 0
        if progress.first is not None and progress.first > progress.base:
            span = Span(progress.base, progress.first)
            return _gaps("stream", (entry.rid, entry.attempt), span)
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
        """Reports the streams with overdue last rows as gaps."""
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
                    found += _gaps("stream", key, span)
        return found

    def _row(
        self, key: tuple[str, Attempt], seq: int, count: int, *, is_last: bool
    ) -> list[RecordingGap]:
        progress = self._of(key)
        progress.has_ended |= is_last
        if progress.first is None:
            progress.first = seq
            if progress.base is None:  # where it begins is not known yet
                progress.numbers = GapTracker(seq)
        return _gaps("stream", key, progress.numbers.pass_over(seq, seq + count))

    def _of(self, key: tuple[str, Attempt]) -> _Progress:
        progress = self._attempts.get(key)
        if progress is None:
            progress = self._attempts[key] = _Progress()
            if len(self._attempts) > MAX_ATTEMPTS:
                gone, _ = self._attempts.popitem(last=False)
                self._ended.pop(gone, None)
        return progress


def _gaps(source: LostSource, key: tuple[str, Attempt], span: Span | None) -> list[RecordingGap]:
    return [] if span is None else [RecordingGap(source, *key, span.start, span.stop - span.start)]


def is_generate_to_worker(event: str, entry: Entry) -> bool:
    """Whether it tells where the rows of an attempt begin."""
    return event == "sent" and entry.kind == "generate" and entry.attempt != NO_ATTEMPT


Build = Callable[[int, int], Record]
"""A record, from its number and its time in nanoseconds."""

UNDECIDED_NS = 1_000_000_000
"""A stream's first rows may overtake the word that their request is one of those wanted."""
MAX_UNDECIDED = 10_000


@dataclass(slots=True)
class Heard:
    """What a recorder has heard, in messages and tokens."""

    tap: int = 0
    stream: int = 0
    told: int = 0
    malformed: int = 0
    lost_tap: int = 0
    """Messages of the tap that did not come."""
    lost_tokens: int = 0
    """Tokens of streams that did not come."""


class RecorderCore:
    """Turns messages into records."""

    def __init__(self, wanted: Filter) -> None:
        self._wanted = wanted
        self._choice = Choice(wanted)
        self._tap: GapTracker | None = None
        """The numbers of the router's tap; None: nothing was heard of it."""
        self._streams = StreamGaps()
        self._undecided: deque[tuple[int, bytes, list[Entry]]] = deque()
        self.heard = Heard()

    @property
    def awaits_rows(self) -> bool:
        """Whether rows of ended requests are still to come; not for longer than some seconds."""
        return self._streams.awaits_rows

    def tapped(self, topic: bytes, entries: list[Entry], now_ns: int) -> list[Build]:
        """A message of the router's tap."""
        try:
            mark = mark_in(topic)
        except RemoteProtocolError:
            self.heard.malformed += 1
            return []
        self.heard.tap += 1
        if self._tap is None or mark.n < self._tap.next:
            self._tap = GapTracker(mark.n)
        span = self._tap.pass_over(mark.n, mark.n + 1)
        built = [self._lost(gap) for gap in _gaps("tap", ("", NO_ATTEMPT), span)]
        built += self._followed(mark, entries, now_ns)
        if self._wanted.is_everything:
            built.append(_tap(mark, entries))
            return built
        chosen = self._choice.routed(entries)
        if chosen:
            built.append(_tap(mark, chosen))
        return [*built, *self._decide(now_ns)]

    def published(self, topic: bytes, entries: list[Entry], now_ns: int) -> list[Build]:
        """A message that a worker published."""
        self.heard.stream += 1
        if self._wanted.is_everything or self._choice.is_published(topic, entries):
            return [*self._missed(entries), _stream(topic, entries)]
        if len(self._undecided) < MAX_UNDECIDED:
            self._undecided.append((now_ns, topic, entries))
        return []

    def told(self, entries: Sequence[Entry]) -> list[Build]:
        """Takes the router's messages to the recorder, which the router sends to every client."""
        kept = [entry for entry in entries if entry.kind != "lease"]
        if not kept:
            return []
        self.heard.told += 1
        return [lambda seq, now_ns: ToldRecord(seq, now_ns, kept)]

    def another_router(self) -> None:
        """The tap that comes next is that of another router process."""
        self._tap = None  # its numbers have nothing to do with those before

    def tick(self, now_ns: int) -> list[Build]:
        """Time passes; call it a few times per second."""
        overdue = [self._lost(gap) for gap in self._streams.tick(now_ns)]
        return [*overdue, *self._decide(now_ns)]

    def _followed(self, mark: TapMark, entries: Iterable[Entry], now_ns: int) -> list[Build]:
        gaps: list[RecordingGap] = []
        try:
            for entry in entries:
                if is_generate_to_worker(mark.event, entry):
                    gaps += self._streams.sent(entry)
                elif mark.event == "received" and entry.kind in ENDINGS:
                    self._streams.finished(entry, now_ns)
        except RemoteProtocolError:
            self.heard.malformed += 1
        return [self._lost(gap) for gap in gaps]

    def _missed(self, entries: Iterable[Entry]) -> list[Build]:
        gaps: list[RecordingGap] = []
        try:
            for entry in entries:
                gaps += self._streams.published(entry)
        except RemoteProtocolError:
            self.heard.malformed += 1
        return [self._lost(gap) for gap in gaps]

    def _decide(self, now_ns: int) -> list[Build]:
        """Returns waiting messages of chosen requests; drops those that waited too long."""
        built: list[Build] = []
        waiting, self._undecided = self._undecided, deque()
        for heard_ns, topic, entries in waiting:
            if self._choice.is_published(topic, entries):
                built += [*self._missed(entries), _stream(topic, entries)]
            elif now_ns - heard_ns < UNDECIDED_NS:
                self._undecided.append((heard_ns, topic, entries))
        return built

    def _lost(self, gap: RecordingGap) -> Build:
        if gap.source == "tap":
            self.heard.lost_tap += gap.n_missing
        else:
            self.heard.lost_tokens += gap.n_missing
        return lambda seq, now_ns: LostRecord(seq, now_ns, *gap)


def _tap(mark: TapMark, entries: list[Entry]) -> Build:
    return lambda seq, now_ns: Tap(
        seq, now_ns, mark.event, mark.n, mark.at, mark.connection, mark.name, entries
    )


def _stream(topic: bytes, entries: list[Entry]) -> Build:
    return lambda seq, now_ns: Stream(seq, now_ns, topic, entries)
