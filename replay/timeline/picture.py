"""A timeline as a picture: PNG or SVG, drawn by matplotlib, which is an optional dependency."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# matplotlib's stubs leave much untyped.

import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.timeline import colours
from rolloutbus.replay.timeline.bars import BAND, GAP, HATCHES, LOST_HATCH, Bar, LaneShape, Style
from rolloutbus.replay.timeline.lanes import Span, Timeline, WorkerLane

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


def _draw_updates(axis: Any, updates: Iterable[Span], duration_s: float) -> None:  # noqa: ANN401
    top = axis.get_ylim()[1]
    for span in updates:
        axis.axvline(span.end_s, color="black", linewidth=0.6, linestyle=":")
        axis.axvspan(span.start_s, span.end_s, color=colours.of_version(span.version), alpha=0.35)
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
        Patch(facecolor=colours.of_version(each), label=_of_colour(each, shown[-1]))
        for each in shown[: len(colours.VERSIONS)]
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
    again = version + len(colours.VERSIONS)
    return f"decode, v{version}, v{again}, …" if again <= newest else f"decode, v{version}"
