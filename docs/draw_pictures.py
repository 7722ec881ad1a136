"""Records a small run and draws the pictures of docs/watching.md: `make pictures`.

The run is real, so the pictures differ a little each time: look at them before committing them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# matplotlib's stubs leave much untyped.

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop
from demo_run import record_demo_run
from matplotlib.figure import Figure
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.terminal_theme import SVG_EXPORT_THEME

from rolloutbus.cli.commands.top import OLD_BEAT_MS, framed, view_of
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.timeline.lanes import Timeline, clipped
from rolloutbus.replay.timeline.picture import draw
from rolloutbus.replay.timeline.timeline import timeline_of
from rolloutbus.trainer_adapter.client.fleet_frames import TopFrame

PICTURES = Path(__file__).parent / "pictures"
COLUMNS = 92
CHARACTER_IN = 0.087, 0.185
"""Width and height."""
AROUND_UPDATE_S = 0.15


def main() -> None:
    """Draw all of them."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        frames = uvloop.run(record_demo_run(Path(temporary)))
        whole = timeline_of(Journal(Path(temporary) / "journal"))
    draw(whole, PICTURES / "timeline.png", title="Two workers, four updates, a pause and a kill")
    draw(_around_an_update(whole), PICTURES / "update.png", title="One update, nearer")
    shown = _most_telling(frames)
    totals = [each.tokens_per_s for each in frames[: shown + 1]]
    view = framed(view_of(frames[shown], totals), hint="q: quit")
    _draw_terminal(view, PICTURES / "top.png")
    sys.stdout.write(f"{', '.join(sorted(each.name for each in PICTURES.iterdir()))}\n")


def _around_an_update(whole: Timeline) -> Timeline:
    """The second one: caches are warm, and all workers are there."""
    update = whole.updates[1]
    return clipped(whole, update.start_s - AROUND_UPDATE_S, update.end_s + AROUND_UPDATE_S)


def _most_telling(frames: Sequence[TopFrame]) -> int:
    """Number of the frame that shows most: a worker has fallen silent, an update waits for it."""

    def weight(number: int) -> tuple[int, int, float]:
        frame = frames[number]
        n_busy = sum(bool(row.tokens_per_s and row.n_running) for row in frame.rows)
        is_silent = any(row.beat_age_ms > OLD_BEAT_MS for row in frame.rows)
        return n_busy, is_silent + bool(frame.updates), frame.tokens_per_s

    return max((n for n, frame in enumerate(frames) if frame.rows), key=weight)


def _draw_terminal(content: RenderableType, path: Path) -> None:
    """What a terminal shows, as a picture."""
    console = Console(
        width=COLUMNS, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    lines = console.render_lines(content, pad=True)
    width, height = CHARACTER_IN
    size = COLUMNS * width + 0.3, len(lines) * height + 0.3
    figure = Figure(figsize=size, facecolor="#101418")
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            _draw_text(figure, segment, (column, row), size)
            column += segment.cell_length
    figure.savefig(path, dpi=130, facecolor=figure.get_facecolor())


def _draw_text(
    figure: Figure, segment: Segment, at: tuple[int, int], size_in: tuple[float, float]
) -> None:
    style = segment.style
    colour = "#D8DEE4"
    if style is not None and style.color is not None and not style.color.is_default:
        colour = style.color.get_truecolor(SVG_EXPORT_THEME).hex
    is_bold = style is not None and bool(style.bold)
    is_dim = style is not None and bool(style.dim)
    for offset, character in enumerate(segment.text):
        if character != " ":
            figure.text(
                (0.15 + (at[0] + offset) * CHARACTER_IN[0]) / size_in[0],
                1 - (0.15 + (at[1] + 0.78) * CHARACTER_IN[1]) / size_in[1],
                character,
                family="DejaVu Sans Mono",
                fontsize=10,
                color=colour,
                alpha=0.6 if is_dim else 1.0,
                fontweight="bold" if is_bold else "normal",
            )


if __name__ == "__main__":
    main()
