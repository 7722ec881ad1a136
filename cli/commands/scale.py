"""`rolloutbus scale | restart | drain`: change the workers of a fleet that serves."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.options import Address, AsJson, Deadline, YourKey, example, not_empty
from rolloutbus.cli.terminal import ExitStatus, counted, fail, print_json, run
from rolloutbus.cli.terminal import ask as question
from rolloutbus.cli.verbs import Verbs
from rolloutbus.launcher.control_socket import Done, Order, Restart, Scale, ask
from rolloutbus.launcher.discovery import find_fleet
from rolloutbus.launcher.scaling import DRAIN_S

FleetName = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
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

app = Verbs()


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


@app.command(epilog=example("rolloutbus drain w7 --address tcp://10.0.0.1:7777#KEY --key me.key"))
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its name; see `status`.")],
    address: Address = "",
    key: YourKey = "",
    deadline: Deadline = DRAIN_S,
    as_json: AsJson = False,
) -> None:
    """Have a worker of any host leave when it has finished what it runs.

    What keeps it running must not start it again after exit status 0. One that is away is not
    expected back any more. If the deadline passes first, it drains all the same.
    """
    result = question(
        address,
        key,
        lambda client: client.shutdown_worker(worker, deadline_s=deadline, check=False),
    )
    if result.silent:
        fail(f"{worker} has not drained within {deadline:g} s, or has died", ExitStatus.FAILED)
    for error in result.errors.values():
        fail(f"{worker}: {error}", ExitStatus.FAILED)
    if as_json:
        print_json({"drained": worker})
    else:
        sys.stdout.write(f"{worker} has drained, and leaves\n")


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
        sys.stdout.write(f"{counted(len(left), 'worker')}: {', '.join(left)}\n")
