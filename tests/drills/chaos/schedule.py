"""Which faults come when: drawn from the seed before anything runs.

Faults come in salvos: those of one salvo strike at the same moment, and the next salvo comes when
the work they hit should have found another place. So one recovery can be told from the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

FaultKind = Literal[
    "kill_worker",
    "kill_host",
    "kill_client",
    "stop_worker",
    "stop_host",
    "stop_router",
    "partition_worker",
    "partition_client",
    "kill_router",
]
Cut = Literal["", "both", "up", "down", "half"]
"""Which way a partition goes; `half`: the router's side sees a reset, the other nothing."""

SHARES: Mapping[FaultKind, float] = {
    "kill_worker": 0.18,
    "kill_host": 0.18,
    "kill_client": 0.04,
    "stop_worker": 0.22,
    "stop_host": 0.05,
    "stop_router": 0.03,
    "partition_worker": 0.15,
    "partition_client": 0.05,
    "kill_router": 0.1,
}
"""40 % kills, 30 % stops, 20 % partitions, 10 % router kills."""

SALVO_S = 5.0
"""From one salvo to the next, about: longer than a worker's loss takes to be noticed."""
MIXED_ROUTER_SHARE = 0.25
"""Of faults of the router that strike together with others; the rest come alone."""
ROUTER_KINDS: frozenset[FaultKind] = frozenset({"kill_router", "stop_router"})
STOP_S = (0.1, 12.0)
ROUTER_STOP_S = (0.5, 6.0)
PARTITION_S = (0.5, 8.0)
LONG_RUN_S = 60.0
"""A shorter run has shorter stops and partitions."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: FaultKind
    target: int
    """Number of the worker, client or process of clients, modulo those fit to be hit."""
    duration_s: float = 0.0
    """Of a stop or a partition."""
    cut: Cut = ""


@dataclass(frozen=True, slots=True)
class Salvo:
    """Faults of one moment."""

    at_s: float
    """After the first fault of the run."""
    faults: list[Fault] = field(default_factory=list[Fault])


def draw_salvos(rng: Random, n_faults: int, seconds: float) -> list[Salvo]:
    """`n_faults` faults in their shares, over about so many seconds."""
    kinds = draw_kinds(rng, n_faults)
    n_salvos = max(2, round(seconds / SALVO_S))
    routers: list[FaultKind] = [kind for kind in kinds if kind in ROUTER_KINDS]
    n_others = n_faults - len(routers)
    n_alone = min(round(len(routers) * (1.0 - MIXED_ROUTER_SHARE)), n_salvos // 2, n_others)
    alone = routers[:n_alone]
    for kind in alone:
        kinds.remove(kind)
    n_mixed = min(len(kinds), n_salvos - n_alone)
    groups = [kinds[number::n_mixed] for number in range(n_mixed)]
    # Never two of them in a row: the second would only prolong the recovery from the first.
    gaps = sorted(rng.sample(range(n_mixed), min(n_alone, n_mixed)), reverse=True)
    for gap, kind in zip(gaps, alone, strict=True):
        groups.insert(gap, [kind])
    longest_s = min(1.0, seconds / LONG_RUN_S)
    return [
        Salvo(
            (number + rng.uniform(0.0, 0.15)) * seconds / len(groups),
            [_draw_fault(rng, kind, longest_s) for kind in group],
        )
        for number, group in enumerate(groups)
    ]


def draw_kinds(rng: Random, n_faults: int) -> list[FaultKind]:
    """Exact shares, in random order."""
    wanted: dict[FaultKind, float] = {kind: share * n_faults for kind, share in SHARES.items()}
    kinds: list[FaultKind] = [kind for kind, n in wanted.items() for _ in range(int(n))]
    by_rest = sorted(wanted, key=lambda kind: int(wanted[kind]) - wanted[kind])
    kinds += by_rest[: n_faults - len(kinds)]
    rng.shuffle(kinds)
    return kinds


def _draw_fault(rng: Random, kind: FaultKind, share: float) -> Fault:
    target = rng.randrange(1 << 16)
    if kind in ("stop_worker", "stop_host", "stop_router"):
        shortest_s, longest_s = ROUTER_STOP_S if kind == "stop_router" else STOP_S
        stop_s = shortest_s + share * rng.uniform(0.0, longest_s - shortest_s)
        return Fault(kind, target, stop_s)
    if kind in ("partition_worker", "partition_client"):
        cut: Cut = rng.choice(("both", "up", "down", "half"))
        return Fault(kind, target, share * rng.uniform(*PARTITION_S), cut)
    return Fault(kind, target)
