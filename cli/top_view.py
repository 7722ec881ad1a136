"""How `rolloutbus top` looks: one frame as text for a terminal, also a narrow one over ssh."""

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolloutbus.cli.top import TopFrame, TopRow

CURVE = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
STATE_STYLES = {"ready": "green", "updating": "cyan", "paused": "yellow", "asleep": "yellow"}
"""Any other state is red; the word says it, too."""
OLD_BEAT_MS = 1500
"""Three heartbeats that did not come."""
MAX_NOTES = 8
"""Lines about troubles: the table must stay in sight."""


def view_of(
    frame: TopFrame, totals: Sequence[float], *, stale: str = "", max_rows: int | None = None
) -> Group:
    """Everything of one frame.

    Args:
        frame: the newest.
        totals: tokens per second of the frames so far, oldest first.
        stale: why there is no newer one; empty: it is fresh.
        max_rows: how many workers can be shown; None: all.
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
    if frame.counted:
        told = ", ".join(f"{name} +{n}" for name, n in sorted(frame.counted.items()))
        yield Text(f"router counted: {told}", "dim")
