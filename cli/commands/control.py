"""`rolloutbus pause | resume`: stop and go on, for the whole fleet or one worker."""

from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from rich.console import Console

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.control import PauseMode
from rolloutbus.cli.options import Address, Deadline, YourKey, example, not_empty
from rolloutbus.cli.terminal import ExitStatus, ask
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult

Worker = Annotated[
    str,
    typer.Option(
        "--worker", metavar="NAME", callback=not_empty, help="Only this one. Default: all."
    ),
]

app = typer.Typer()


@app.command(epilog=example("rolloutbus pause --mode drain --worker w0"))
def pause(
    address: Address = "",
    key: YourKey = "",
    mode: Annotated[
        PauseMode,
        typer.Option(
            help="What becomes of running requests: `in_place` keeps their KV cache, `retract` "
            "computes it again, `drain` finishes them first, `abort` stops them."
        ),
    ] = "in_place",
    worker: Worker = "",
    deadline: Deadline = 30.0,
) -> None:
    """Stop sampling; requests wait until `resume`."""
    target = worker or "fleet"
    _command(
        address,
        key,
        lambda client: client.pause(mode, target=target, deadline_s=deadline, check=False),
    )


@app.command(epilog=example("rolloutbus resume"))
def resume(
    address: Address = "", key: YourKey = "", worker: Worker = "", deadline: Deadline = 30.0
) -> None:
    """Go on after a pause."""
    target = worker or "fleet"
    _command(
        address, key, lambda client: client.resume(target=target, deadline_s=deadline, check=False)
    )


def _command(
    address: str, key: str, question: Callable[[RolloutClient], Awaitable[FleetResult]]
) -> None:
    """Send it and print one line per worker; exit status 1 unless every worker did it."""
    result = ask(address, key, question)
    console = Console(highlight=False)
    for name, answer in sorted(result.by_worker.items()):
        console.print(f"{name}: {answer if isinstance(answer, BusError) else 'done'}", markup=False)
    for name in sorted(result.silent):
        console.print(f"{name}: no answer", markup=False)
    if not result.by_worker and not result.silent:
        console.print("no workers")
    if result.errors or result.silent:
        raise typer.Exit(ExitStatus.FAILED)
