"""`rolloutbus status | ls`: what the router knows, and which fleets run on this machine."""

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.cli.options import Address, AsJson, YourKey, example, not_empty
from rolloutbus.cli.terminal import (
    ExitStatus,
    ask,
    by_name,
    checked,
    connected,
    counted,
    fail,
    print_json,
    run,
)
from rolloutbus.cli.verbs import Verbs
from rolloutbus.launcher.discovery import RunningFleet, running_fleets
from rolloutbus.trainer_adapter.client.fleet_events import NOT_WRITTEN, unwritten_versions

STATE_STYLES = {"ready": "green", "updating": "cyan", "paused": "yellow", "asleep": "yellow"}
"""States in which a worker is as it should be; any other one is red."""
UNBOUNDED = 100_000
"""Columns where no terminal is: each line stays whole, for `grep`."""

app = Verbs()


@app.command(epilog=example("rolloutbus status --watch"))
def status(
    context: typer.Context,
    address: Address = "",
    key: YourKey = "",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again and again.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Of --watch.")] = 1.0,
    *,
    member: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            callback=not_empty,
            help="Fail unless this worker, or the store of this name, is here and well: a probe. "
            "One that is paused, updating or asleep is well.",
        ),
    ] = "",
) -> None:
    """Show the workers, their weights and what they do."""
    if member:
        if watch:
            fail("--member asks once: leave --watch out", ExitStatus.USAGE)
        probe(ask(address, key, lambda client: client.status()), member, as_json=as_json)
        return
    source = context.get_parameter_source("interval")
    if not watch and source is not None and source.name == "COMMANDLINE":
        fail("--interval needs --watch: without it the status is shown once", ExitStatus.USAGE)
    shown = _print_json if as_json else _print_table
    run(shown(address, key, interval if watch else 0.0))


def probe(found: FleetStatus, name: str, *, as_json: bool) -> None:
    """Show one member.

    Raises:
        typer.Exit: with 1; it is not here, or not as it should be, and stderr says why.
    """
    store = found.store if found.store is not None and found.store.name == name else None
    member = next((each for each in found.workers if each.name == name), store)
    if member is None:
        why = found.absent.get(name, "")
        fail(f"{name} is not here" + (f": {why}" if why else ""), ExitStatus.FAILED)
    state = member.state if isinstance(member, WorkerStatus) else "ready"
    if as_json:
        print_json(member)
    else:
        sys.stdout.write(f"{name} is {state}\n")
    if state not in STATE_STYLES:
        reasons = member.blocked_by.values() if isinstance(member, WorkerStatus) else ()
        fail(f"{name} is {state}. {' '.join(reasons)}".rstrip(), ExitStatus.FAILED)


async def _print_json(address: str, key: str, interval_s: float) -> None:
    async with connected(address, key) as client:
        while True:
            found = await client.status()
            print_json(found)
            if not interval_s:
                return
            await asyncio.sleep(interval_s)


async def _print_table(address: str, key: str, interval_s: float) -> None:
    console = Console(width=None if sys.stdout.isatty() else UNBOUNDED)
    async with connected(address, key) as client:
        if not interval_s:
            console.print(report(await client.status()))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(report(await client.status()), refresh=True)
                await asyncio.sleep(interval_s)


def report(found: FleetStatus) -> Group:
    """The table of workers, what is going on and what is wrong, and a line about the router."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    is_shared = len({each.policy for each in found.workers}) > 1
    for name in ("worker", "state", *(["policy"] if is_shared else []), "engine"):
        table.add_column(name)
    has_prefixes = any(each.n_marks for each in found.workers)
    numbers = ("version", "running", "tokens", *(["prefixes"] if has_prefixes else []))
    for name in (*numbers, "heartbeat", "stall", "pid"):
        table.add_column(name, justify="right")
    # w10 comes after w9.
    for each in sorted(found.workers, key=by_name):
        table.add_row(
            each.name,
            Text(each.state, STATE_STYLES.get(each.state, "red")),
            *([each.policy] if is_shared else []),
            each.engine,
            str(each.version),
            f"{each.n_running}/{each.slots}",
            f"{each.n_tokens:,}",
            *([f"{each.n_marks:,}"] if has_prefixes else []),
            f"{each.beat_age_ms} ms",
            f"{each.stalled_ms:.1f} ms",
            str(each.pid),
        )
    return Group(table, *_notes(found), _router_line(found))


def _notes(found: FleetStatus) -> Iterator[Text]:
    """Yields updates under way, and why workers get no requests; each reason only once."""
    for each in found.updates:
        yield Text(
            f"{each.policy} v{each.version} is {each.phase}"
            f"{' (catching up)' if each.is_catch_up else ''} for {each.age_ms / 1000:.1f} s: "
            f"{each.n_prepared} of {each.n_targets} prepared, {each.n_active} active",
            "cyan",
        )
    workers = sorted(found.workers, key=by_name)
    for each in workers:
        if each.problem:
            yield Text(f"{each.name} gets no work until it has caught up: {each.problem}", "red")
    for each in workers:
        for reason, sentence in each.blocked_by.items():
            is_said = (
                (reason == "behind" and each.problem)
                or (reason == "tripped" and each.name in found.troubled)
                or (reason == "not_ready" and "paused" in each.blocked_by)
            )
            if not is_said:
                yield Text(f"{each.name} gets no work: {sentence}", "yellow")
    if unwritten_versions(found):
        yield Text(f"the store {NOT_WRITTEN}", "red")
    if found.standby == "missing":
        yield Text("the router that is to stand by for this one does not show itself", "yellow")
    for name, why in sorted(found.troubled.items()):
        yield Text(f"{name} gets no work: {why}", "red")
    for name, why in sorted(found.absent.items()):
        yield Text(f"{name} is not here: {why}", "red")


def _router_line(found: FleetStatus) -> Text:
    committed = ", ".join(f"{policy} v{version}" for policy, version in found.committed.items())
    parts = [
        f"router epoch {found.router_epoch}" + (", recovering" if found.recovering else ""),
        f"committed: {committed or 'nothing yet'}",
        f"{found.n_running} running",
        f"{found.n_queued} queued",
        counted(found.n_clients, "client"),
        counted(sum(found.sessions.values()), "session"),
    ]
    if found.standby:
        parts.insert(1, f"standby {found.standby}")
    return Text(" | ".join(parts), "dim")


@app.command(epilog=example("rolloutbus ls --json"))
def ls(as_json: AsJson = False) -> None:
    """List the fleets that you run on this machine, oldest first.

    Other commands find a fleet by its name: `rolloutbus status --name NAME`.
    """
    fleets = checked(running_fleets)
    if as_json:
        print_json(fleets)
    elif fleets:
        _show(fleets)
    else:
        sys.stderr.write("no fleet of yours runs here\n")


def _show(fleets: list[RunningFleet]) -> None:
    """One row for each fleet if the terminal is wide enough, otherwise one line for each value."""
    rows = [_values(each) for each in fleets]
    table = Table(*rows[0], box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    unbounded = console.options.update(width=sys.maxsize)
    if console.measure(table, options=unbounded).maximum <= console.width:
        console.print(table)
        return
    blocks = ["".join(f"{name}: {value}\n" for name, value in row.items()) for row in rows]
    sys.stdout.write("\n".join(blocks))


def _values(fleet: RunningFleet) -> dict[str, str]:
    return {
        "name": fleet.name,
        "address": fleet.address or "starting",
        "model": fleet.model or "-",
        "engine": fleet.engine,
        "workers": str(fleet.workers),
        "since": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fleet.since)),
        "pid": str(fleet.pid),
    }
