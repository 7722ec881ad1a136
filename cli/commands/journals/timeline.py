"""`rolloutbus timeline`: what each worker of a recorded fleet did when, as a page or a picture."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.commands.journals.gaps import AllowGaps, fail_reading, finish
from rolloutbus.cli.options import AsJson, example
from rolloutbus.cli.terminal import ExitStatus, checked, fail
from rolloutbus.cli.verbs import Verbs
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.timeline.browser import page_of, trace_of
from rolloutbus.replay.timeline.lanes import Timeline, clipped
from rolloutbus.replay.timeline.picture import draw
from rolloutbus.replay.timeline.timeline import timeline_of

app = Verbs()


@app.command(epilog=example("rolloutbus timeline ./journal -o timeline.html"))
def timeline(
    journal: Annotated[Path, typer.Argument(help="A directory that `record` has written.")],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Ends with .html (to zoom in), .png or .svg (pictures), "
            "or .json (for ui.perfetto.dev).",
        ),
    ],
    since: Annotated[
        float,
        typer.Option("--from", metavar="SECONDS", min=0.0, help="Since the recording began."),
    ] = 0.0,
    until: Annotated[
        float, typer.Option("--to", metavar="SECONDS", min=0.0, help="0: to its end.")
    ] = 0.0,
    allow_gaps: AllowGaps = False,
    as_json: AsJson = False,
) -> None:
    """Draw what a journal tells: requests, weight versions, updates, stalls and pauses, by worker.

    The journal should have been recorded with the router's tap (`up --tap`).
    """
    write = checked(partial(_writer_for, output))
    try:
        source = Journal(journal, skip=allow_gaps)
        found = timeline_of(source)
    except (JournalError, OSError) as error:
        fail_reading(error)
    if since or until:
        found = clipped(found, since, until or found.duration_s)
    try:
        checked(partial(write, found))
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror or error}", ExitStatus.FAILED)
    n_executions = sum(len(lane.executions) for lane in found.lanes)
    told = {
        "workers": len(found.lanes),
        "executions": n_executions,
        "updates": len(found.updates),
        "moves": len(found.moves),
        "seconds": round(found.duration_s, 3),
        "notes": found.notes,
    }
    head = (
        f"{output}: {len(found.lanes)} workers, {n_executions} executions, "
        f"{len(found.updates)} updates, {len(found.moves)} moves of sessions "
        f"in {found.duration_s:.1f} s"
    )
    text = "\n  ".join([head, *found.notes])
    finish(source, told, text, as_json=as_json, allow_gaps=allow_gaps)


def _writer_for(path: Path) -> Callable[[Timeline], None]:
    match path.suffix:
        case ".html":
            return lambda found: _write(path, page_of(found).encode())
        case ".json":
            return lambda found: _write(path, trace_of(found))
        case ".png" | ".svg":
            return lambda found: draw(found, path)
        case _:
            raise SettingsError(f"{path.name}: the name must end with .html, .png, .svg or .json")


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
