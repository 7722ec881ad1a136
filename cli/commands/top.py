"""`rolloutbus top`: shows a live view of a fleet in a terminal."""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.cli.commands.status import STATE_STYLES
from rolloutbus.cli.keyboard import QUIT, keys
from rolloutbus.cli.options import Address, YourKey, example
from rolloutbus.cli.terminal import connected, print_json, run
from rolloutbus.cli.verbs import Verbs
from rolloutbus.trainer_adapter.client.fleet_frames import TopFrame, TopRow
from rolloutbus.trainer_adapter.client.fleet_observer import FleetObserver

CURVE = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
OLD_BEAT_MS = 1500
"""Three heartbeats that did not come."""
MAX_NOTES = 8
"""Lines about troubles: the table must stay in sight."""


def view_of(
    frame: TopFrame, totals: Sequence[float], *, stale: str = "", max_rows: int | None = None
) -> Group:
    """The newest frame; `totals`: tokens per second of the frames so far, oldest first.

    `stale`: why there is no newer one; `max_rows`: workers that can be shown, None: all.
    """
    parts = [_fleet_line(frame), _curve(totals), _workers(frame.rows[:max_rows])]
    n_hidden = len(frame.rows) - len(frame.rows[:max_rows])
    if n_hidden:
        parts.append(Text(f"… and {n_hidden} more workers: make the terminal higher", "dim"))
    notes = list(_notes(frame))
    parts += notes[:MAX_NOTES]
    if len(notes) > MAX_NOTES:
        parts.append(Text(f"… and {len(notes) - MAX_NOTES} more", "dim"))
    if stale:
        parts.append(Text(f"no answer: {stale}", "bold red"))
    return Group(*parts)


def framed(view: Group, *, hint: str) -> Panel:
    """The view with a border, for a screen of its own."""
    return Panel(view, title="rolloutbus top", subtitle=hint, padding=(0, 1))


def _fleet_line(frame: TopFrame) -> Text:
    committed = ", ".join(f"{policy} v{version}" for policy, version in frame.committed.items())
    states: dict[str, int] = {}
    for row in frame.rows:
        states[row.state] = states.get(row.state, 0) + 1
    told = ", ".join(f"{n} {state}" for state, n in states.items()) or "none"
    line = Text()
    facts = [
        ("workers", told),
        ("weights", committed or "nothing committed"),
        ("running", f"{frame.n_running}/{frame.n_slots}"),
        ("queue", f"{frame.n_queued}"),
        ("sessions", f"{frame.n_sessions}"),
        ("clients", f"{frame.n_clients}"),
        ("router epoch", f"{frame.router_epoch}"),
    ]
    if frame.is_recovering:
        facts.append(("router", "recovering"))
    for name, value in facts:
        line.append(f"{name} ", "dim")
        line.append(f"{value}   ", "bold red" if name == "queue" and frame.n_queued else "bold")
    return line


def _curve(totals: Sequence[float]) -> Text:
    shown = totals[-CURVE_WIDTH:]
    high = max(shown, default=0.0) or 1.0
    bars = "".join(CURVE[min(int(each / high * len(CURVE)), len(CURVE) - 1)] for each in shown)
    line = Text("tokens/s ", "dim")
    line.append(f"{totals[-1] if totals else 0:,.0f} ", "bold")
    line.append(bars, "green")
    line.append(f" max {high:,.0f}", "dim")
    return line


def _workers(rows: Iterable[TopRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("version", "running", "sess", "tokens/s", "stall ms", "cache", "heartbeat ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        behind = f" (-{row.n_behind})" if row.n_behind else ""
        table.add_row(
            row.name,
            Text(row.state, STATE_STYLES.get(row.state, "red")),
            Text(f"v{row.version}{behind}", "yellow" if behind else ""),
            f"{row.n_running}/{row.slots}",
            str(row.n_sessions),
            "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            f"{row.stalled_ms:.1f}" if row.stalled_ms else "-",
            "-" if row.cache_used is None else f"{row.cache_used:.0%}",
            Text(f"{row.beat_age_ms:,}", "red" if row.beat_age_ms > OLD_BEAT_MS else ""),
        )
    return table


def _notes(frame: TopFrame) -> Iterable[Text]:
    for each in frame.updates:
        what = " (catching up)" if each.is_catch_up else ""
        yield Text(
            f"update {each.policy} v{each.version}{what}: {each.phase} for "
            f"{each.age_ms / 1000:.1f} s, {each.n_prepared} of {each.n_targets} prepared, "
            f"{each.n_active} active",
            "cyan",
        )
    here = {row.name for row in frame.rows}
    for row in frame.rows:
        if row.problem:
            yield Text(f"{row.name} gets no work: {row.problem}", "red")
    for name, why in sorted(frame.troubled.items()):
        if name not in here:
            yield Text(f"{name} is gone: {why}", "red")
    for name, why in sorted(frame.absent.items()):
        if name not in frame.troubled:
            yield Text(f"{name} is not here: {why}", "red")
    if frame.counted:
        told = ", ".join(f"{name} +{n}" for name, n in sorted(frame.counted.items()))
        yield Text(f"router counted: {told}", "dim")


HINT = "q: quit"
OTHER_LINES = 14
"""Of a screen, for all that is no row of the table."""

app = Verbs()


@app.command(epilog=example("rolloutbus top --interval 2"))
def top(
    address: Address = "",
    key: YourKey = "",
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Between frames.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, after one interval, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per frame instead.")
    ] = False,
    gauges: Annotated[
        bool,
        typer.Option("--gauges/--no-gauges", help="Ask the engines for their gauges, too."),
    ] = True,
) -> None:
    """Watch workers, weights, sessions, tokens per second, the queue and stalls; q ends it."""
    run(Watch(interval, with_gauges=gauges).run(address, key, once=once, as_json=as_json))


class Watch:
    """Asks again and again, and shows what comes."""

    def __init__(self, interval_s: float, *, with_gauges: bool) -> None:
        self._interval_s = interval_s
        self._gauges_every = int(with_gauges)

    async def run(self, address: str, key: str, *, once: bool, as_json: bool) -> None:
        """Shows frames until the end. Raises Unreachable: no router answers the first question."""
        async with connected(address, key) as client:
            observer = FleetObserver(client, gauges_every=self._gauges_every)
            if once:
                await observer.look()  # rates need two
                await asyncio.sleep(self._interval_s)
                await self._print(observer, as_json=as_json)
            elif as_json or not sys.stdout.isatty():
                await self._print_all(observer, as_json=as_json)
            else:
                await self._live(observer)

    async def _print_all(self, observer: FleetObserver, *, as_json: bool) -> None:
        """One frame after the other: for scripts, and where there is no screen to be redrawn."""
        while True:
            try:
                await self._print(observer, as_json=as_json)
            except BusError as error:  # the client goes on looking for its router
                sys.stderr.write(f"no answer: {error}\n")
            await asyncio.sleep(self._interval_s)

    async def _live(self, observer: FleetObserver) -> None:
        """Frames on a screen of their own, which is gone afterwards."""
        console = Console()
        is_over = asyncio.Event()

        def pressed(some: list[str]) -> None:
            if not QUIT.isdisjoint(some):
                is_over.set()

        frame = (await observer.look()).frame
        with (
            Live(console=console, auto_refresh=False, screen=True) as live,
            keys(pressed),
        ):
            async with asyncio.TaskGroup() as tasks:
                showing = tasks.create_task(self._show(observer, live, frame))
                await is_over.wait()
                showing.cancel()

    async def _show(self, observer: FleetObserver, live: Live, frame: TopFrame) -> None:
        stale = ""
        while True:
            n_rows = max(1, live.console.size.height - OTHER_LINES)
            view = view_of(frame, list(observer.history.totals), stale=stale, max_rows=n_rows)
            live.update(framed(view, hint=HINT), refresh=True)
            await asyncio.sleep(self._interval_s)
            try:
                frame, stale = (await observer.look()).frame, ""
            except BusError as error:
                stale = str(error)

    async def _print(self, observer: FleetObserver, *, as_json: bool) -> None:
        frame = (await observer.look()).frame
        if as_json:
            print_json(frame)
        else:
            Console().print(view_of(frame, list(observer.history.totals)))
            sys.stdout.flush()
