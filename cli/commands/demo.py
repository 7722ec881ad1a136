"""`rolloutbus demo`: the demonstration in `examples/`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.cli.options import Quiet, example
from rolloutbus.cli.terminal import ExitStatus, fail, run
from rolloutbus.cli.verbs import Verbs

app = Verbs()


@app.command(epilog=example("rolloutbus demo --seed 1"))
def demo(
    seed: Annotated[int, typer.Option(help="Of model, task and sampling.")] = 0,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object, last.")
    ] = False,
    updates: Annotated[
        bool, typer.Option("--updates/--no-updates", help="Publish the trained weights.")
    ] = True,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Where the run's directory is made."),
    ] = Path("runs"),
    record: Annotated[
        str, typer.Option(metavar="DIR", help="Write a journal of the run; see `replay`.")
    ] = "",
) -> None:
    """Train a tiny model by asynchronous RL over the bus: two workers, three minutes, no GPU.

    Half way it kills one worker on purpose. Leaves config.json, metrics.jsonl and reward.png.
    """
    try:
        # Imports torch, which takes seconds and is an optional dependency.
        from rolloutbus.examples.demo import DemoOptions, run_demo  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(
            f"the demo needs {error.name}: pip install rolloutbus[transformers]", ExitStatus.FAILED
        )
    options = DemoOptions(seed=seed, quiet=quiet, updates=updates, runs=output, record=record)
    summary = run(run_demo(options))
    if quiet and not as_json:
        sys.stdout.write(f"{summary.run_directory}\n")
    if as_json:
        sys.stdout.write(summary.as_json() + "\n")
