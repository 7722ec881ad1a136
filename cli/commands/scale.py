"""`rolloutbus scale | restart`: change the workers of a fleet that runs on this machine."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.options import AsJson, example, not_empty
from rolloutbus.cli.terminal import print_json, run
from rolloutbus.launcher.control_socket import Done, Order, Restart, Scale, ask
from rolloutbus.launcher.discovery import find_fleet
from rolloutbus.launcher.scaling import DRAIN_S

FleetName = Annotated[
    str,
    typer.Option(
        "--name",
        metavar="NAME",
        callback=not_empty,
        help="Which fleet; see `rolloutbus ls`. Default: the only one that runs here.",
    ),
]
Drain = Annotated[
    float,
    typer.Option(
        "--drain",
        min=0.001,
        metavar="SECONDS",
        help="A worker's requests may still take so long; then they go on at another worker.",
    ),
]

app = typer.Typer()


@app.command(epilog=example("rolloutbus scale -n 8"))
def scale(
    workers: Annotated[int, typer.Option("--workers", "-n", help="How many there are to be.")],
    name: FleetName = "",
    drain: Drain = DRAIN_S,
    as_json: AsJson = False,
) -> None:
    """Add or drain workers of a fleet that `up` runs on this machine, until there are so many.

    New workers serve once they have the committed weights; those with the highest numbers leave
    when they have finished what they run. Ctrl-C ends new workers that do not serve yet; those that
    drain leave all the same.
    """
    run(_carry_out(name, [Scale(workers, drain)], as_json=as_json))


@app.command(epilog=example("rolloutbus restart w0 w1"))
def restart(
    workers: Annotated[list[str], typer.Argument(metavar="WORKER…", help="One after the other.")],
    name: FleetName = "",
    drain: Drain = DRAIN_S,
    as_json: AsJson = False,
) -> None:
    """Drain workers of a fleet that `up` runs on this machine, and start them again."""
    run(_carry_out(name, [Restart(worker, drain) for worker in workers], as_json=as_json))


async def _carry_out(name: str, orders: Sequence[Order], *, as_json: bool) -> None:
    fleet = find_fleet(name)
    if not fleet.control:
        raise SettingsError(f"the launcher of the fleet {fleet.name} takes no orders")
    # Steps are for people; what a program reads is the last line.
    steps = sys.stderr if as_json else sys.stdout
    left: list[str] = []
    for order in orders:
        async for reply in ask(Path(fleet.control), order):
            if isinstance(reply, Done):
                left = reply.workers
            else:
                steps.write(f"{reply.who} {reply.what}\n")
                steps.flush()
    if as_json:
        print_json({"workers": left})
    else:
        sys.stdout.write(f"{len(left)} workers: {', '.join(left)}\n")
