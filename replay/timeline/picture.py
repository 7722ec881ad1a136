"""A timeline as a picture: PNG or SVG, drawn by matplotlib, which is an optional dependency."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# matplotlib's stubs leave much untyped.

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rolloutbus.bus.drawing import colours
from rolloutbus.bus.drawing.colours import VERSIONS, ink_on, of_version
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.timeline.lanes import Execution, LaneSpan, Timeline, WorkerLane

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
    "moved": colours.STALL,
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
            fill = of_version(span.version)
            yield _bar(span, self.weights_at, self.band, fill, self._plain)
        for span in lane.weights:
            style = STALL if span.kind == "stall" else NO_EDGE
            yield _bar(span, self.update_at, self.band, FILLS[span.kind], style)
        for execution in lane.executions:
            at = self.rows_at + execution.row + ROW_MARGIN
            for span in execution.spans:
                is_lost = span.kind == "lost"
                fill = FILLS.get(span.kind) or of_version(max(span.version, 0))
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
                ink = ink_on(of_version(span.version))
                yield Label(_middle_s(span), row, f"v{span.version}", ink, is_boxed=False)
        row = self.height(lane) * 0.55
        for span in lane.states:
            if span.end_s - span.start_s > 2 * least_s:
                yield Label(_middle_s(span), row, span.kind, "black", is_boxed=True)


def _bar(span: LaneSpan, top: float, height: float, fill: str, style: Style) -> Bar:
    return Bar(span.start_s, span.end_s, top, height, fill, style)


def _middle_s(span: LaneSpan) -> float:
    return (span.start_s + span.end_s) / 2


def _broke_s(execution: Execution) -> float:
    """Where its tokens ended, which may be long before that was known."""
    lost = (span.start_s for span in execution.spans if span.kind == "lost")
    return min(lost, default=execution.end_s)


WIDTH_IN = 13.0
ROW_IN = 0.13
"""Height of one row of executions while there is room for all of them."""
MAX_LANES_IN, MIN_ROWS_IN = 24.0, 6.0
DOTS_PER_INCH = 110
NOTE_CHARACTERS = 230


def draw(timeline: Timeline, path: Path, *, title: str = "") -> None:
    """Write a picture; the end of the name says which kind.

    Raises:
        SettingsError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    pyplot = _matplotlib()
    n_rows = sum(max(lane.n_rows, 1) for lane in timeline.lanes)
    bands_in = 2 * (BAND + GAP) * ROW_IN * len(timeline.lanes)
    row_in = min(ROW_IN, max(MAX_LANES_IN - bands_in, MIN_ROWS_IN) / max(n_rows, 1))
    shape = LaneShape(ROW_IN / row_in)
    inches = [0.9, 0.6, *(shape.height(lane) * row_in for lane in timeline.lanes)]
    figure = pyplot.Figure(figsize=(WIDTH_IN, sum(inches) + 2.2), layout="constrained")
    grid: Any = figure.subplots(len(inches), 1, sharex=True, height_ratios=inches, squeeze=False)
    axes = [each[0] for each in grid]
    _draw_rates(axes[0], timeline)
    _draw_waiting(axes[1], timeline)
    for axis, lane in zip(axes[2:], timeline.lanes, strict=True):
        _draw_lane(axis, lane, shape, timeline.duration_s)
    axes[-1].set_xlim(0, max(timeline.duration_s, timeline.bin_s))
    axes[-1].set_xlabel("seconds")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    _draw_legend(figure, timeline)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _matplotlib() -> ModuleType:
    try:
        from matplotlib import figure  # noqa: PLC0415 - optional, and slow to load
    except ImportError as error:
        raise SettingsError(
            "a picture needs matplotlib: pip install rolloutbus[replay], or ask for .html"
        ) from error
    return figure


def _draw_rates(axis: Any, timeline: Timeline) -> None:  # noqa: ANN401 - untyped
    rates = [lane.tokens_per_s for lane in timeline.lanes]
    totals = [sum(each) for each in zip(*rates, strict=True)]
    edges = [timeline.bin_s * at for at in range(len(totals) + 1)]
    axis.stairs(totals, edges, fill=True, color="#B5B5B5")
    axis.set_ylabel("tokens/s", rotation=0, ha="right", va="center")
    axis.set_ylim(0, max(totals, default=0) * 1.15 or 1)
    _draw_updates(axis, timeline.updates, timeline.duration_s)
    _plain(axis)


def _draw_updates(axis: Any, updates: Iterable[LaneSpan], duration_s: float) -> None:  # noqa: ANN401
    top = axis.get_ylim()[1]
    for span in updates:
        axis.axvline(span.end_s, color="black", linewidth=0.6, linestyle=":")
        axis.axvspan(span.start_s, span.end_s, color=of_version(span.version), alpha=0.35)
        if span.end_s < duration_s:
            axis.text(span.end_s, top, f" v{span.version}", fontsize=7, va="top")


def _draw_waiting(axis: Any, timeline: Timeline) -> None:  # noqa: ANN401 - untyped
    edges = [timeline.bin_s * at for at in range(len(timeline.waiting) + 1)]
    axis.stairs(timeline.waiting, edges, fill=True, color="#D55E00")
    axis.set_ylabel("waiting at\nthe router", rotation=0, ha="right", va="center")
    axis.set_ylim(0, max(timeline.waiting, default=0) * 1.15 or 1)
    for span in timeline.unrecorded:
        axis.axvspan(span.start_s, span.end_s, facecolor="none", hatch="xx", edgecolor="#888888")
    _plain(axis)


def _draw_lane(
    axis: Any,  # noqa: ANN401 - untyped
    lane: WorkerLane,
    shape: LaneShape,
    duration_s: float,
) -> None:
    _draw_bars(axis, shape.bars(lane))
    crosses = shape.crosses(lane)
    if crosses:
        axis.plot(
            *zip(*crosses, strict=True), "x", markersize=4, markeredgewidth=1.2, color="black"
        )
    for at_s, row, text, ink, is_boxed in shape.labels(lane, duration_s):
        box = {"facecolor": "white", "edgecolor": "#707070", "pad": 1.5, "linewidth": 0.6}
        axis.text(
            *(at_s, row, text),
            ha="center",
            va="center",
            fontsize=8 if is_boxed else 7,
            color=ink,
            bbox=box if is_boxed else None,
        )
    axis.set_ylim(shape.height(lane), 0)
    bands = [at + shape.band / 2 for at in (shape.weights_at, shape.update_at)]
    axis.set_yticks([*bands, shape.rows_at + lane.n_rows / 2], ["weights", "update", "requests"])
    label = "  ".join(filter(None, [lane.name, lane.engine]))
    axis.set_title(label, loc="left", fontsize=9, fontweight="bold", pad=2)
    _plain(axis)
    axis.tick_params(axis="y", length=0)


def _draw_bars(axis: Any, bars: Iterable[Bar]) -> None:  # noqa: ANN401 - untyped
    """One collection for all that are drawn alike: one by one, ten thousand take minutes."""
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - as above

    alike: dict[Style, list[Bar]] = {}
    for bar in bars:
        alike.setdefault(bar.style, []).append(bar)
    for style, some in alike.items():
        corners = [
            [
                (bar.start_s, bar.top),
                (bar.end_s, bar.top),
                (bar.end_s, bar.top + bar.height),
                (bar.start_s, bar.top + bar.height),
            ]
            for bar in some
        ]
        drawn = PolyCollection(
            corners,
            facecolors=[bar.fill for bar in some],
            edgecolors=style.edge,
            linewidths=style.line_width,
            hatch=style.hatch or None,
            zorder=style.depth,
        )
        axis.add_collection(drawn, autolim=False)


def _plain(axis: Any) -> None:  # noqa: ANN401 - untyped
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_legend(figure: Any, timeline: Timeline) -> None:  # noqa: ANN401 - untyped
    from matplotlib.lines import Line2D  # noqa: PLC0415 - as above
    from matplotlib.patches import Patch  # noqa: PLC0415 - as above

    kinds = {span.kind for lane in timeline.lanes for span in lane.states}
    executions = [each for lane in timeline.lanes for each in lane.executions]
    spans = {span.kind for each in executions for span in each.spans}
    shown = sorted({span.version for lane in timeline.lanes for span in lane.versions})
    marks: list[Any] = [
        Patch(facecolor=of_version(each), label=_of_colour(each, shown[-1]))
        for each in shown[: len(VERSIONS)]
    ]
    marks.append(
        Patch(
            facecolor=colours.PREFILL, label="until the first token: queue of the engine, prefill"
        )
    )
    if "unsplit" in spans:
        marks.append(Patch(facecolor=colours.UNSPLIT, label="prefill and decode, not told apart"))
    if "lost" in spans:
        lost = "tokens ended, loss not known yet"
        marks.append(Patch(facecolor="white", edgecolor="black", hatch=LOST_HATCH, label=lost))
    if any(each.outcome not in ("finished", "open") for each in executions):
        ended = "did not finish here"
        marks.append(Line2D([], [], marker="x", color="black", linestyle="", label=ended))
    marks += [
        Patch(facecolor=colours.PULL, label="pulls weights"),
        Patch(facecolor=colours.COMMIT, label="commits"),
        Patch(facecolor=colours.STALL, label="stalls"),
    ]
    marks += [
        Patch(facecolor="white", edgecolor="#707070", hatch=HATCHES.get(kind, ""), label=kind)
        for kind in sorted(kinds)
    ]
    figure.legend(
        handles=marks,
        loc="outside lower left",
        ncols=7,
        fontsize=8,
        frameon=False,
        title="\n".join(textwrap.wrap(" ".join(timeline.notes), NOTE_CHARACTERS)),
        title_fontproperties={"size": 7},
        alignment="left",
    )


def _of_colour(version: int, newest: int) -> str:
    again = version + len(VERSIONS)
    return f"decode, v{version}, v{again}, …" if again <= newest else f"decode, v{version}"
