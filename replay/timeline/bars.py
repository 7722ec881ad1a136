"""The lane of a worker as rectangles, crosses and labels: all of a picture but the drawing. Pure.

Across are seconds, down are rows: two bands, then the rows of executions.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rolloutbus.replay.timeline import colours
from rolloutbus.replay.timeline.lanes import Execution, Span, WorkerLane

BAND, GAP = 1.6, 0.4
"""Heights, in rows, while rows have their full height."""
ROW_MARGIN = 0.08
LINE_WIDTH = 0.3
"""In points."""
MIN_LABEL_SHARE = 0.012
"""A span narrower than that share of the picture gets no label."""
HATCHES = {
    "gone": "xxxx",
    "paused": "////",
    "asleep": "....",
    "draining": "\\\\\\\\",
    "frozen": "oo",
    "torn": "++",
    "broken": "**",
    "starting": "--",
}
LOST_HATCH = "////////"
FILLS = {
    "prefill": colours.PREFILL,
    "unsplit": colours.UNSPLIT,
    "pull": colours.PULL,
    "commit": colours.COMMIT,
    "stall": colours.STALL,
}


class Style(NamedTuple):
    """How some rectangles are drawn, besides their colours."""

    edge: str
    line_width: float
    hatch: str = ""
    depth: float = 1.0
    """What has more lies on top."""


NO_EDGE = Style("none", 0.0)
STALL = Style(colours.STALL, 0.9)
"""Has an edge, so that a millisecond can be seen."""
LOST = Style("black", 0.5, LOST_HATCH)


class Bar(NamedTuple):
    """A rectangle."""

    start_s: float
    end_s: float
    top: float
    height: float
    fill: str
    style: Style


class Label(NamedTuple):
    """A word in the middle of a rectangle."""

    at_s: float
    row: float
    text: str
    ink: str
    is_boxed: bool


class LaneShape:
    """Where things are in a lane; it is the same for all lanes of a picture."""

    def __init__(self, scale: float = 1.0) -> None:
        """`scale`: rows are so many times lower than they would be; bands stay as high."""
        self._plain = Style("white", LINE_WIDTH / scale**2)  # or thin rows are all edges
        self.band = BAND * scale
        self.weights_at = 0.0
        self.update_at = (BAND + GAP) * scale
        self.rows_at = 2 * (BAND + GAP) * scale

    def height(self, lane: WorkerLane) -> float:
        """In rows."""
        return max(lane.n_rows, 1) + self.rows_at

    def bars(self, lane: WorkerLane) -> Iterator[Bar]:
        """Everything that has an extent."""
        for span in lane.versions:
            fill = colours.of_version(span.version)
            yield _bar(span, self.weights_at, self.band, fill, self._plain)
        for span in lane.weights:
            style = STALL if span.kind == "stall" else NO_EDGE
            yield _bar(span, self.update_at, self.band, FILLS[span.kind], style)
        for execution in lane.executions:
            at = self.rows_at + execution.row + ROW_MARGIN
            for span in execution.spans:
                is_lost = span.kind == "lost"
                fill = FILLS.get(span.kind) or colours.of_version(max(span.version, 0))
                style, fill = (LOST, "white") if is_lost else (self._plain, fill)
                yield _bar(span, at, 1 - 2 * ROW_MARGIN, fill, style)
        for span in lane.states:
            is_gone = span.kind == "gone"
            edge, depth = ("#C8C8C8", 0.5) if is_gone else ("#707070", 2.0)
            style = Style(edge, 0.8, HATCHES.get(span.kind, ""), depth)
            yield _bar(span, 0.0, self.height(lane), "none", style)

    def crosses(self, lane: WorkerLane) -> list[tuple[float, float]]:
        """(seconds, row) of each execution that did not finish."""
        return [
            (_broke_s(each), self.rows_at + each.row + 0.5)
            for each in lane.executions
            if each.outcome not in ("finished", "open")
        ]

    def labels(self, lane: WorkerLane, duration_s: float) -> Iterator[Label]:
        """Words that have room."""
        least_s = duration_s * MIN_LABEL_SHARE
        row = self.weights_at + self.band / 2
        for span in lane.versions:
            if span.end_s - span.start_s > least_s:
                ink = colours.ink_on(colours.of_version(span.version))
                yield Label(_middle_s(span), row, f"v{span.version}", ink, is_boxed=False)
        row = self.height(lane) * 0.55
        for span in lane.states:
            if span.end_s - span.start_s > 2 * least_s:
                yield Label(_middle_s(span), row, span.kind, "black", is_boxed=True)


def _bar(span: Span, top: float, height: float, fill: str, style: Style) -> Bar:
    return Bar(span.start_s, span.end_s, top, height, fill, style)


def _middle_s(span: Span) -> float:
    return (span.start_s + span.end_s) / 2


def _broke_s(execution: Execution) -> float:
    """Where its tokens ended, which may be long before that was known."""
    lost = (span.start_s for span in execution.spans if span.kind == "lost")
    return min(lost, default=execution.end_s)
