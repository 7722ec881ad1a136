"""`rolloutbus ls`: the fleets of this user that run on this machine."""

import sys
import time

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from rolloutbus.cli.options import AsJson, example
from rolloutbus.cli.terminal import checked
from rolloutbus.launcher.discovery import RunningFleet, running_fleets

app = typer.Typer()


@app.command(epilog=example("rolloutbus ls --json"))
def ls(as_json: AsJson = False) -> None:
    """List the fleets that you run on this machine, oldest first.

    Other commands find a fleet by its name: `rolloutbus status --name NAME`.
    """
    fleets = checked(running_fleets)
    if as_json:
        sys.stdout.write(msgspec.json.encode(fleets).decode() + "\n")
    elif fleets:
        Console().print(table(fleets))
    else:
        sys.stderr.write("no fleet of yours runs here\n")


def table(fleets: list[RunningFleet]) -> Table:
    """One row for each."""
    shown = Table(box=None, pad_edge=False)
    for column in ("name", "address", "model", "engine", "workers", "since", "pid"):
        shown.add_column(column, overflow="fold")
    for each in fleets:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.since))
        shown.add_row(
            each.name,
            each.address or "starting",
            each.model or "-",
            each.engine,
            str(each.workers),
            began,
            str(each.pid),
        )
    return shown
