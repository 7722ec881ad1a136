"""Draws every life-cycle table of the code into docs/lifecycles.md: `make docs`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolloutbus.bus.membership.lease import MEMBER_LINK
from rolloutbus.engine_worker.engines.sglang.guard import GATE_LIFE
from rolloutbus.router.health.breaker import BREAKER_LIFE
from rolloutbus.router.members.records import MEMBER_LIFE
from rolloutbus.router.pair import PAIR_LIFE
from rolloutbus.router.requests.record import REQUEST_LIFE as ROUTER_REQUEST_LIFE
from rolloutbus.router.requests.record import SESSION_LIFE
from rolloutbus.router.updates.record import UPDATE_LIFE
from rolloutbus.trainer_adapter.client.core.requests import REQUEST_LIFE as CLIENT_REQUEST_LIFE
from rolloutbus.trainer_adapter.store.versions import VERSION_LIFE

Table = Mapping[Any, Mapping[Any, str]]
"""state -> event -> state; each table has its own literals."""

PAGE = Path(__file__).with_name("lifecycles.md")

TABLES: list[tuple[str, str, Table]] = [
    (
        "A member's link to the router",
        "`bus/membership/lease.py`: what a worker or store knows of its own place on the bus.",
        MEMBER_LINK,
    ),
    (
        "One of two routers",
        "`router/pair.py`: the first begins with `asking`, the second with `standby`.",
        PAIR_LIFE,
    ),
    (
        "A member's lease at the router",
        "`router/members/records.py`: one lease of one worker or store; a new epoch, a new record.",
        MEMBER_LIFE,
    ),
    (
        "A request at its client",
        "`trainer_adapter/client/core/requests.py`: the client holds the truth about a request.",
        CLIENT_REQUEST_LIFE,
    ),
    (
        "A request at the router",
        "`router/requests/record.py`: soft state; workers and clients rebuild it after a restart.",
        ROUTER_REQUEST_LIFE,
    ),
    (
        "An open session at the router",
        "`router/requests/record.py`: the place of a session between the turns of an agent.",
        SESSION_LIFE,
    ),
    (
        "A worker's breaker at the router",
        "`router/health/breaker.py`: too many failures, and the worker is left alone for a while.",
        BREAKER_LIFE,
    ),
    (
        "A weight update at the router",
        "`router/updates/record.py`: the transaction that brings one version to the fleet.",
        UPDATE_LIFE,
    ),
    (
        "A weight version in the store",
        "`trainer_adapter/store/versions.py`: from reservation to retirement.",
        VERSION_LIFE,
    ),
    (
        "The gate before SGLang's scheduler",
        "`engine_worker/engines/sglang/guard.py`: `go_on` needs all memory and whole weights.",
        GATE_LIFE,
    ),
]


def drawing(title: str, about: str, table: Table) -> str:
    """One section: a Mermaid state diagram and the same as a table."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, moves in table.items():
        for event, following in moves.items():
            arrows.setdefault((state, following), []).append(event)
    names = {state: state.replace("-", "_") for state in table}
    lines = [f"## {title}", "", about, "", "```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {names[next(iter(table))]}"]
    for (state, following), events in arrows.items():
        lines.append(f"    {names[state]} --> {names[following]}: {', '.join(events)}")
    lines += ["```", "", "| state | event | next |", "|---|---|---|"]
    for state, moves in table.items():
        lines += [f"| `{state}` | `{event}` | `{to}` |" for event, to in moves.items()]
        if not moves:
            lines.append(f"| `{state}` | (end) | |")
    return "\n".join([*lines, ""])


def page() -> str:
    """The whole page."""
    head = (
        "# Life cycles\n\n"
        "Drawn from the tables in the code by `make docs`; do not edit. An event that a state does "
        "not list is an error and changes nothing.\n"
    )
    return "\n".join([head, *(drawing(*table) for table in TABLES)])


if __name__ == "__main__":
    text = page()
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text() == text else "docs/lifecycles.md is stale: run `make docs`")
    PAGE.write_text(text)
