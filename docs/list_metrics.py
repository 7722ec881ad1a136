"""Writes the table of metrics in docs/watching.md from what `/metrics` answers: `make docs`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric

from rolloutbus.bus.wire.counters import (
    ROUTER_COUNTERS,
    STORE_GAUGES,
    WORKER_COUNTERS,
    WORKER_DURATIONS,
)
from rolloutbus.bus.wire.durations import DurationCounter
from rolloutbus.bus.wire.messages.control import FleetStatus, StoreStatus, WorkerStatus
from rolloutbus.bus.wire.messages.weights import UpdateStatus
from rolloutbus.gateway.metrics_api import families_of, own_families
from rolloutbus.gateway.traffic import Traffic
from rolloutbus.trainer_adapter.client.core.effects import ClientCounters

PAGE = Path(__file__).with_name("watching.md")
BEGIN = "<!-- metrics: made by `make docs` -->\n"
END = "<!-- end of metrics -->\n"
SUFFIX = {"counter": "_total"}


def example() -> Iterator[Metric]:
    """Every family, with a sample."""
    durations = {name: DurationCounter().counted() for name in WORKER_DURATIONS}
    worker = WorkerStatus(
        *("w0", "b.1", "paused", "default", 6, "fake", 8, 2, 640, 120, 12.5, 42, "", 9),
        blocked_by={"paused": "It is to be paused."},
        counters=dict.fromkeys(WORKER_COUNTERS, 1),
        durations=durations,
    )
    status = FleetStatus(
        *(1, "r", False, [worker], {"default": 7}, 4, 2, 1, dict.fromkeys(ROUTER_COUNTERS, 1)),
        updates=[UpdateStatus("default", 8, "preparing", 1500, 1)],
        pause="in_place",
        absent={"w1": "it was lost (expired)"},
        store=StoreStatus("store", 120, dict.fromkeys(STORE_GAUGES, 1.0)),
    )
    traffic = Traffic()
    traffic.answers["/generate", "200"] += 1
    for each in (traffic.durations, traffic.first_events):
        each["/generate"].add(0.1)
    gauges = {"w0": {"token_usage": 0.25}}
    yield from families_of(status, gauges)
    yield from own_families(traffic, ClientCounters())


def table() -> str:
    """A row for each family."""
    rows = [
        f"| `{each.name}{SUFFIX.get(each.type, '')}` | {each.type} "
        f"| {', '.join(f'`{label}`' for label in _labels(each))} | {each.documentation} |\n"
        for each in example()
    ]
    return "| metric | type | labels | what |\n|---|---|---|---|\n" + "".join(rows)


def _labels(family: Metric) -> list[str]:
    return [name for name in family.samples[0].labels if name != "le"]


def page() -> str:
    """The page with the table as it is to be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        is_so = page() == PAGE.read_text(encoding="utf-8")
        sys.exit(0 if is_so else "docs/watching.md has another table of metrics: run `make docs`")
    PAGE.write_text(page(), encoding="utf-8")
