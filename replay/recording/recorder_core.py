"""What a recorder writes down of what it hears, and what it notices to have missed.

Pure: what comes in is a message and the time, what goes out are records without their numbers.
Spec: docs/journal.md.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rolloutbus.bus.streams.reassembly import GapTracker
from rolloutbus.bus.streams.tap import TapMark, mark_in
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.replay.journal.records import LostRecord, Record, Stream, Tap, ToldRecord
from rolloutbus.replay.recording.choice import Choice, Filter
from rolloutbus.replay.recording.gaps import RecordingGap, StreamGaps, is_generate_to_worker

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
        missed = (
            [RecordingGap("tap", "", NO_ATTEMPT, span.start, span.stop - span.start)]
            if span
            else []
        )
        built = [self._lost(gap) for gap in missed]
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
        if self._wanted.is_everything:
            return [*self._missed(entries), _stream(topic, entries)]
        if self._choice.is_published(topic, entries):
            return [*self._missed(entries), _stream(topic, entries)]
        if len(self._undecided) < MAX_UNDECIDED:
            self._undecided.append((now_ns, topic, entries))
        return []

    def told(self, entries: Sequence[Entry]) -> list[Build]:
        """What the router says to the recorder as to any client."""
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
        """Published messages whose requests were chosen meanwhile; the late ones are not wanted."""
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
