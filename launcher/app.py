"""All groups of commands under one name."""

from typing import Annotated

import typer

from launcher.commands import (
    actors,
    chaos,
    control,
    demo,
    doctor,
    export,
    forward,
    generate,
    keys,
    ls,
    record,
    replay,
    sim,
    status,
    tail,
    timeline,
    top,
    up,
    weights,
)
from launcher.version import DISTRIBUTION, installed_version

HELP = """A message bus between RL trainers and inference engines.

Exit status: 0 done, 1 failed, 2 usage, 3 no router answers, 130 Ctrl-C, 143 SIGTERM.
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{DISTRIBUTION} {installed_version()}")
        raise typer.Exit


app = typer.Typer(
    name=DISTRIBUTION,
    help=HELP,
    epilog="Example: rolloutbus up -n 2 --engine fake",
    no_args_is_help=True,
    add_completion=False,
    # Errors of ours are one line; a traceback is a bug, and is shown as Python shows it.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
GROUPS = (
    up, ls, status, generate, control, weights, actors, keys, record, replay, export, doctor,
    tail, forward, timeline, top, demo, sim, chaos,
)  # fmt: skip
for group in GROUPS:
    app.add_typer(group.app)


@app.callback()
def _top(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """See HELP."""
