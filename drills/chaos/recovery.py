"""How long requests stood still after a fault, told from the history alone.

Only streams say when they move. Of each fault, those count that were with the victim when it
struck; each recovers with its next token or its ending.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from drills.chaos.history import Life
from drills.chaos.schedule import FaultKind

IN_FLIGHT_S = 0.1
"""Tokens that come sooner after a fault were on their way when it struck."""
FIRST_TOKEN_S = 1.0
"""A new request is served at a router this long after it is back, at most."""
ROUTER_S = 4.5
"""The same for requests that were open when it died."""
WORKER_S = 5.0
NOTICED_S = 3.5
"""After this long work that was hit has usually found another place."""

BOUND_S: dict[str, float] = {
    "kill_worker": WORKER_S,
    "kill_host": WORKER_S,
    "stop_worker": WORKER_S,
    "stop_host": WORKER_S,
    "partition_worker": WORKER_S,
    "partition_client": WORKER_S,
    "kill_router": ROUTER_S,
    "new_requests": FIRST_TOKEN_S,
    "combined": WORKER_S + ROUTER_S,
}
"""`combined`: two blows at once: the router on its way back and a worker or client hit, or a
request whose client was cut off or whose new worker's engine stood still."""

TAKEN_OVER = frozenset({"kill_worker", "kill_host", "stop_worker", "partition_worker"})


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault as it happened."""

    kind: FaultKind
    victim: str
    """Name of the worker or client; `router`."""
    at: float
    until: float
    """When its cause was gone: thawed, healed, router ready; `at` where nothing is waited for."""

    @property
    def counts_from(self) -> float:
        """When recovery could begin.

        Others take over the work of a worker that is away; nobody stands in for a router, for a
        client's own link or for an engine that only pauses.
        """
        return self.at if self.kind in TAKEN_OVER else self.until


class Recovery(msgspec.Struct, frozen=True):
    """Of one class of faults; times in milliseconds."""

    n_faults: int
    n_requests: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    bound_ms: float

    @property
    def is_within_bound(self) -> bool:
        """Whether p99 is."""
        return self.p99_ms <= self.bound_ms


def recoveries(lives: Iterable[Life], faults: Sequence[Struck]) -> dict[str, Recovery]:
    """By class of fault; classes that hit nobody are left out."""
    streams = [_Stream(life) for life in lives if life.invoked[0].is_streamed]
    waits: defaultdict[str, list[float]] = defaultdict(list)
    n_faults: Counter[str] = Counter()
    for fault in faults:
        is_mixed = any(_is_second_blow(fault, other) for other in faults)
        n_faults["combined" if is_mixed else fault.kind] += 1
        for stream in streams:
            moved_at = stream.recovered_at(fault)
            if moved_at is not None:
                is_own = not is_mixed and not stream.was_held_up(fault, moved_at, faults)
                name = fault.kind if is_own else "combined"
                waits[name].append(max(0.0, moved_at - fault.counts_from))
            waited_s = None if is_mixed else stream.waited_for(fault, faults)
            if waited_s is not None:
                waits["new_requests"].append(waited_s)
    n_faults["new_requests"] = sum(fault.kind == "kill_router" for fault in faults)
    return {
        name: _recovery(n_faults[name], sorted(found), BOUND_S[name])
        for name, found in sorted(waits.items())
    }


class _Stream:
    """When one stream moved, and who moved it."""

    def __init__(self, life: Life) -> None:
        self._client = life.invoked[0].op.split(":")[0]
        self._begun_at = life.invoked[0].at
        self._moves = [(each.at, each.worker) for each in life.progressed]
        self._moves += [(each.at, each.worker) for each in life.ended]
        self._ended_at = life.ended[0].at if life.ended else math.inf

    def recovered_at(self, fault: Struck) -> float | None:
        """When it moved again; None if the fault was none of its own."""
        if not self._begun_at < fault.at or not self._was_with(fault):
            return None
        from_s = fault.counts_from
        if self._ended_at < from_s + (IN_FLIGHT_S if from_s == fault.at else 0.0):
            return None
        return self._moved_after(max(from_s, fault.at + IN_FLIGHT_S))

    def waited_for(self, fault: Struck, faults: Sequence[Struck]) -> float | None:
        """Seconds until its first token, if it was asked for while a router was coming back.

        Of those asked for when the next fault was about to strike, nothing can be said.
        """
        next_at = min((other.at for other in faults if other.at > fault.at), default=math.inf)
        until = min(fault.until + NOTICED_S, next_at - FIRST_TOKEN_S)
        if fault.kind != "kill_router" or not fault.at + IN_FLIGHT_S < self._begun_at < until:
            return None
        moved_at = self._moved_after(self._begun_at)
        if self.was_held_up(fault, moved_at, faults):
            return None
        return max(0.0, moved_at - max(self._begun_at, fault.until))

    def was_held_up(self, fault: Struck, moved_at: float, faults: Sequence[Struck]) -> bool:
        """Whether meanwhile its client was cut off, or its new worker's engine stood still."""
        mover = next((worker for at, worker in self._moves if at == moved_at), "")
        suspects = {"partition_client": self._client, "stop_host": mover}
        return any(
            suspects.get(other.kind) == other.victim
            and fault.at - IN_FLIGHT_S < other.until
            and other.at < moved_at
            for other in faults
            if other is not fault
        )

    def _was_with(self, fault: Struck) -> bool:
        if fault.kind == "kill_router":
            return True
        if fault.kind == "partition_client":
            return self._client == fault.victim
        before = [worker for at, worker in self._moves if at < fault.at]
        return bool(before) and before[-1] == fault.victim

    def _moved_after(self, moment: float) -> float:
        return next((at for at, _ in self._moves if at > moment), math.inf)


def _is_second_blow(one: Struck, other: Struck) -> bool:
    """Whether a router died while the other was not got over yet, or the other way round."""
    if one is other or "kill_router" not in (one.kind, other.kind):
        return False
    first, second = sorted((one, other), key=lambda fault: fault.at)
    if first.kind == second.kind:
        return second.at < first.until + ROUTER_S
    until = first.until if first.kind == "kill_router" else first.at
    return second.at < until + NOTICED_S


def _recovery(n_faults: int, waits: list[float], bound_s: float) -> Recovery:
    return Recovery(
        n_faults=n_faults,
        n_requests=len(waits),
        p50_ms=_ms(waits[len(waits) // 2]),
        p99_ms=_ms(waits[math.ceil(0.99 * len(waits)) - 1]),
        max_ms=_ms(waits[-1]),
        bound_ms=_ms(bound_s),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1) if seconds < math.inf else 1e12
