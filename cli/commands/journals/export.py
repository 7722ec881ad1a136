"""`rolloutbus export`: the rollouts of a journal as a table."""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.cli.commands.journals.gaps import AllowGaps, fail_reading, finish
from rolloutbus.cli.options import AsJson, example
from rolloutbus.cli.terminal import ExitStatus, checked, fail
from rolloutbus.cli.verbs import Verbs
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.trajectories import NO_TAP, Trajectories, Trajectory
from rolloutbus.replay.trajectory_files import write
from rolloutbus.trainer_adapter.client.text import TokenizerFile, load_tokenizer

app = Verbs()


@app.command(epilog=example("rolloutbus export ./journal -o trajectories.parquet"))
def export(
    journal: Annotated[Path, typer.Argument(help="A directory that `record` has written.")],
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Ends with .parquet or .jsonl."),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, or the model directory with it: adds texts."),
    ] = None,
    allow_gaps: AllowGaps = False,
    as_json: AsJson = False,
) -> None:
    """Write one row for each finished rollout of a journal, and say what of it is missing.

    The journal must have been recorded with the router's tap (`up --tap`).
    """
    loaded = checked(partial(load_tokenizer, tokenizer)) if tokenizer else None
    try:
        source = Journal(journal, skip=allow_gaps)
        found = Trajectories(source)
        n_rows = checked(lambda: write(output, _texted(found, loaded) if loaded else found))
    except (JournalError, OSError) as error:
        fail_reading(error)
    counts = {
        "unfinished": found.requests.n_unfinished,
        "open": found.requests.n_open,
        "headless": found.requests.n_headless,
        "malformed": found.requests.n_malformed,
    }
    finish(
        source,
        {"rows": n_rows, **counts, "lacks_tap": found.requests.lacks_tap},
        f"{n_rows} rows in {output} ({', '.join(f'{n} {name}' for name, n in counts.items())})",
        as_json=as_json,
        allow_gaps=allow_gaps,
        # Results hold all their tokens: nothing of a row comes from streams.
        harmless=["lost_stream"],
    )
    if found.requests.lacks_tap:
        if not allow_gaps:
            fail(f"{journal} {NO_TAP}", ExitStatus.FAILED)
        sys.stderr.write(f"note: {journal} {NO_TAP}\n")


def _texted(rows: Iterable[Trajectory], tokenizer: TokenizerFile) -> Iterator[Trajectory]:
    for row in rows:
        row.prompt_text = tokenizer.decode(row.prompt_ids.tolist(), skip_special_tokens=False)
        row.output_text = tokenizer.decode(row.output_ids.tolist(), skip_special_tokens=False)
        yield row
