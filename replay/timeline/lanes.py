"""What a timeline shows: lanes of spans, in seconds since the beginning of the recording. Pure.

`replay.timeline.timeline` makes them, with the tracks and bins below; the renderers draw them.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from rolloutbus.bus.wire.entry import Attempt

SpanKind = Literal[
    # of an execution
    "prefill",
    "decode",
    "unsplit",
    "lost",
    # of a worker
    "version",
    "starting",
    "paused",
    "asleep",
    "draining",
    "frozen",
    "torn",
    "broken",
    "gone",
    # of an update
    "pull",
    "commit",
    "stall",
    "publish",
    # of a session
    "moved",
    # of the recording
    "unrecorded",
]
Outcome = Literal["finished", "failed", "cancelled", "expired", "refused", "lost", "fenced", "open"]
NO_VERSION = -1


class LaneSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that lasted."""

    kind: SpanKind
    start_s: float
    end_s: float
    version: int = NO_VERSION
    """Of the weights that it is about."""
    n_tokens: int = 0
    """`decode`: sampled in it."""
    note: str = ""


class Execution(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt at one request, on the worker that it was given to."""

    rid: str
    attempt: Attempt
    row: int
    """Of its lane: executions of one row do not overlap."""
    start_s: float
    """When the router gave it to the worker; without a tap, its first tokens."""
    end_s: float
    outcome: Outcome
    """`open`: no end of it was heard."""
    spans: list[LaneSpan]
    """In order, without overlap."""
    n_tokens: int
    """Sampled in this attempt, as far as it was heard."""
    n_prompt_tokens: int = 0
    n_resumed: int = 0
    """Tokens that came from earlier attempts."""
    waited_s: float = 0.0
    """At the router, before."""
    session: str = ""
    group: str = ""
    note: str = ""
    """Finish reason, or why it was lost."""


class WorkerLane(msgspec.Struct, frozen=True):
    """Everything about one worker."""

    name: str
    policy: str
    engine: str
    slots: int
    n_rows: int
    versions: list[LaneSpan]
    """Kind `version`: which weights were active when."""
    states: list[LaneSpan]
    """Whenever it was not ready: `paused`, …, `gone`."""
    weights: list[LaneSpan]
    """`pull`, `commit` and `stall`: overlapping, in this order of depth."""
    executions: list[Execution]
    """In order of their starts."""
    tokens_per_s: list[float]
    """Of each bin."""


class Timeline(msgspec.Struct, frozen=True):
    """A whole recording."""

    began_at: float
    """Unix time of second 0."""
    duration_s: float
    bin_s: float
    """Width of the bins of `waiting` and `tokens_per_s`."""
    lanes: list[WorkerLane]
    """By name, w10 after w9."""
    updates: list[LaneSpan]
    """Kind `publish`: one per publication, from the trainer's order to its answer."""
    waiting: list[int]
    """Most requests that waited at the router at once, of each bin."""
    unrecorded: list[LaneSpan]
    """While no recorder ran."""
    notes: list[str]
    """What a reader must know: what was measured how, and what is not in the recording."""
    moves: list[LaneSpan]
    """Kind `moved`, of no length: a session got another worker; `note` says which, and why."""


FINE_S = 0.05
"""Width of the bins that are counted into, before it is known how long a recording is."""
MAX_BINS = 240


class Track:
    """A value, and since when; what it was before becomes spans."""

    def __init__(self) -> None:
        self._value: tuple[SpanKind, int] | None = None
        self._since_s = 0.0
        self._note = ""
        self.spans: list[LaneSpan] = []

    @property
    def kind(self) -> SpanKind | None:
        """The present value; None if there is none to show."""
        return self._value[0] if self._value is not None else None

    def change(
        self, kind: SpanKind | None, at_s: float, version: int = -1, *, note: str = ""
    ) -> None:
        """Sets the value from `at_s` on; the same value again changes nothing."""
        value = None if kind is None else (kind, version)
        if value == self._value:
            return
        self.close(at_s)
        self._value, self._note = value, note
        # What was said late may reach back into the span before it, which `close` has cut.
        self._since_s = at_s

    def close(self, at_s: float) -> None:
        """Ends the last span."""
        if self._value is not None and at_s > self._since_s:
            kind, version = self._value
            self.spans.append(LaneSpan(kind, self._since_s, at_s, version, note=self._note))
        self._value = None


class Sums:
    """Amounts, summed up in bins of time."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}

    def add(self, at_s: float, amount: int) -> None:
        """Count this much at this time."""
        bin_ = int(at_s / FINE_S)
        self._bins[bin_] = self._bins.get(bin_, 0) + amount

    def rates(self, n_bins: int, width: int) -> list[float]:
        """Amounts per second, in bins that are `width` fine ones wide."""
        sums = [0] * n_bins
        for bin_, amount in self._bins.items():
            sums[min(bin_ // width, n_bins - 1)] += amount
        return [round(each / (width * FINE_S), 3) for each in sums]


class Highs:
    """A number that changes now and then: the highest in each bin."""

    def __init__(self) -> None:
        self._bins: dict[int, tuple[int, int]] = {}
        """Bin -> the highest and the last in it."""

    def note(self, at_s: float, value: int) -> None:
        """Records the number at a time."""
        bin_ = int(at_s / FINE_S)
        high, _ = self._bins.get(bin_, (0, 0))
        self._bins[bin_] = max(high, value), value

    def highest(self, n_bins: int, width: int) -> list[int]:
        """In bins that are `width` fine ones wide."""
        found = [0] * n_bins
        last = at = 0
        for bin_, (high, value) in sorted(self._bins.items()):
            here = min(bin_ // width, n_bins - 1)
            for between in range(at, here + 1):
                found[between] = max(found[between], last)
            found[here] = max(found[here], high)
            last, at = value, here
        for rest in range(at, n_bins):
            found[rest] = max(found[rest], last)
        return found


def bins_of(duration_s: float) -> tuple[int, int]:
    """How many bins, and how many fine ones each is wide, for a recording of this length."""
    n_fine = int(duration_s / FINE_S) + 1
    width = -(-n_fine // MAX_BINS)
    return -(-n_fine // width), width


def clipped(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """What lies between two seconds; the first of them is second 0 of the result."""
    start_s = min(max(start_s, 0.0), timeline.duration_s)
    end_s = min(max(end_s, start_s), timeline.duration_s)
    first_bin = int(start_s / timeline.bin_s)
    bins = slice(first_bin, int(end_s / timeline.bin_s) + 1)
    # Bins are not cut: the part begins where its first bin does.
    start_s = first_bin * timeline.bin_s
    return Timeline(
        timeline.began_at + start_s,
        end_s - start_s,
        timeline.bin_s,
        [_lane(lane, (start_s, end_s), bins) for lane in timeline.lanes],
        _cut(timeline.updates, start_s, end_s),
        timeline.waiting[bins],
        _cut(timeline.unrecorded, start_s, end_s),
        [*timeline.notes, f"Seconds {start_s:.2f} to {end_s:.2f} of {timeline.duration_s:.2f}."],
        _cut(timeline.moves, start_s, end_s),
    )


def _lane(lane: WorkerLane, between_s: tuple[float, float], bins: slice) -> WorkerLane:
    start_s, end_s = between_s
    kept = [
        _execution(each, start_s, end_s)
        for each in lane.executions
        if each.start_s < end_s and each.end_s > start_s
    ]
    rows = {row: at for at, row in enumerate(sorted({each.row for each in kept}))}
    return msgspec.structs.replace(
        lane,
        n_rows=len(rows),
        versions=_cut(lane.versions, start_s, end_s),
        states=_cut(lane.states, start_s, end_s),
        weights=_cut(lane.weights, start_s, end_s),
        executions=[msgspec.structs.replace(each, row=rows[each.row]) for each in kept],
        tokens_per_s=lane.tokens_per_s[bins],
    )


def _execution(execution: Execution, start_s: float, end_s: float) -> Execution:
    return msgspec.structs.replace(
        execution,
        start_s=max(execution.start_s, start_s) - start_s,
        end_s=min(execution.end_s, end_s) - start_s,
        spans=_cut(execution.spans, start_s, end_s),
    )


def _cut(spans: Iterable[LaneSpan], start_s: float, end_s: float) -> list[LaneSpan]:
    return [
        msgspec.structs.replace(
            each,
            start_s=max(each.start_s, start_s) - start_s,
            end_s=min(each.end_s, end_s) - start_s,
        )
        for each in spans
        if each.start_s < end_s and each.end_s > start_s
    ]
