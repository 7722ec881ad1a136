"""`make chaos`: break a real fleet on purpose and account for every request."""

import secrets
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import msgspec
import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from rolloutbus.cli.options import example
from rolloutbus.cli.terminal import ExitStatus, checked, run
from tests.drills.chaos.run import run_chaos
from tests.drills.chaos.settings import ChaosSettings

COUNTED = (
    "requests", "ok", "moved", "behind", "excused", "collected", "lost", "duplicated",
    "wrong_tokens", "stale", "poisoned", "failed",
)  # fmt: skip

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog=example('make chaos ARGS="--faults 40 --minutes 1 --seed 7"'))
def chaos(
    *,
    faults: Annotated[int, typer.Option(min=1, help="How many, over the whole run.")] = 200,
    clients: Annotated[int, typer.Option(min=1, help="Clients, in two processes.")] = 50,
    open_requests: Annotated[
        int, typer.Option("--open", min=1, help="Requests kept open by all clients together.")
    ] = 500,
    workers: Annotated[int, typer.Option(min=2, help="Workers, each with an engine host.")] = 8,
    minutes: Annotated[float, typer.Option(min=0.1, help="Length of the whole run.")] = 5.0,
    seed: Annotated[int | None, typer.Option(help="Repeat the faults of an earlier run.")] = None,
    engine: Annotated[
        Literal["transformers", "fake"], typer.Option(help="The engine that samples.")
    ] = "fake",
    model: Annotated[
        str, typer.Option(metavar="PATH", help="Model of the transformers engine.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Keep histories and logs in this new directory.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last.")] = False,
) -> None:
    """Kill, freeze and cut off real processes under load; show that nothing is lost or doubled.

    Router, store and workers run on this machine behind a proxy that can break their links.
    Afterwards a checker reads what the clients wrote down. Exit status 1: something was wrong.
    """
    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    settings = checked(
        lambda: ChaosSettings(
            seed=chosen,
            faults=faults,
            clients=clients,
            open_requests=open_requests,
            workers=workers,
            minutes=minutes,
            engine=engine,
            model=model,
            directory=str(out) if out else "",
        )
    )
    console = Console(stderr=True, highlight=False)
    console.print(f"seed {chosen}")
    with nullcontext() if quiet or as_json else console.status("starting") as status:
        report = run(run_chaos(settings, _shown_on(status)))
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        show_report(msgspec.to_builtins(report), sys.stdout)
    if report.problems:
        raise typer.Exit(ExitStatus.FAILED)


def _shown_on(status: Status | None) -> Callable[[str], None]:
    """Where a run tells how far it is."""

    def show(line: str) -> None:
        if status is not None:
            status.update(line)

    return show


def show_report(report: dict[str, Any], file: TextIO) -> None:
    """Write a report as people read it."""
    counts = Table(*COUNTED, box=None, pad_edge=False, header_style="bold")
    counts.add_row(*(str(report[name]) for name in COUNTED))
    offered, committed = report["updates"]
    complaints = [Text(line) for line in (*report["stories"], *report["problems"])]
    Console(file=file, highlight=False).print(
        counts,
        f"weight updates: {committed} of {offered} committed",
        "",
        _recovery_table(report["recovery"]["by_fault"]),
        "",
        _router_table(report["recovery"]["router"]),
        "",
        *(
            f"{kind}: {before[0]} -> {after[0]} fds, {before[1]} -> {after[1]} MiB"
            for kind, (before, after) in (
                (kind, each.values()) for kind, each in report["usage"].items()
            )
        ),
        *complaints,
        sep="\n",
    )


def _recovery_table(by_fault: dict[str, dict[str, float]]) -> Table:
    titles = (
        "recovery from", "faults", "streams", "hit again", "p50 ms", "p99 ms", "max ms",
        "bound ms", "stall p99 ms",
    )  # fmt: skip
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for name, each in by_fault.items():
        is_late = each["p99_ms"] > each["bound_ms"]
        cells = (f"{value:.0f}" for value in each.values())
        table.add_row(name, *cells, style="red" if is_late else "")
    return table


def _router_table(router: dict[str, Any]) -> Table:
    titles = ("killed router", "n", "p50 ms", "p99 ms", "max ms")
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for name in ("restart", "first_new", "new", "old_moved", "old_ended"):
        if router[name] is not None:
            table.add_row(name, *(f"{value:.0f}" for value in router[name].values()))
    return table


if __name__ == "__main__":
    app()
