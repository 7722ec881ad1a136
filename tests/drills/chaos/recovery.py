"""How long requests stood still after a fault, told from the history alone.

**Definition.** A fault *hits* a stream that was open when it struck: a fault of a worker the
streams whose last token came from it, one of a client's link those of that client, one of the
router all. The stream has recovered with its next token or its outcome; tokens of the first tenth
of a second were on their way before. Its *stall* is the time from the blow until then: what its
reader sees. Its *recovery* is the same time, except that it begins when the cause is gone where
nobody else could do the work: the router serves again, the client's own link is healed, an engine
that had only stopped goes on. Whatever befalls a worker begins with the blow.

A stream that is hit again while it waits, or whose new worker is, is only counted as interrupted
under the first fault, unless that one's bound had passed by then: then it counts with the time
until the second blow. Under the blow from which recovery begins last it counts as any other. No
other wait is left out.

Only streams say when they move; requests that are not streamed are judged by their outcome alone.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tests.drills.chaos.history import Life
from tests.drills.chaos.schedule import ROUTER_KINDS, FaultKind

IN_FLIGHT_S = 0.1
"""Tokens that come sooner after a fault were on their way when it struck."""
ROUTER_S = 4.5
WORKER_S = 5.0
LONGEST_S = 30.0
"""No fault lasts longer."""
FROZEN_NOTICED_S = 2.0
"""Within this long after an engine stopped, its worker may still be given work."""

BOUND_S: Mapping[FaultKind, float] = {
    "kill_worker": WORKER_S,
    "kill_host": WORKER_S,
    "stop_worker": WORKER_S,
    "stop_host": WORKER_S,
    "stop_router": ROUTER_S,
    "partition_worker": WORKER_S,
    "partition_client": WORKER_S,
    "kill_router": ROUTER_S,
}
"""Of the 99th percentile; nothing is waited for when a client is killed."""

BEGINS_WITH_BLOW = frozenset({"kill_worker", "kill_host", "stop_worker", "partition_worker"})


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault as it happened."""

    kind: FaultKind
    victim: str
    """Name of the worker, client or process of clients; `router`."""
    at: float
    until: float
    """When its cause was gone: thawed, healed, router ready; `at` where nothing is waited for."""

    @property
    def counts_from(self) -> float:
        """When recovery begins."""
        return self.at if self.kind in BEGINS_WITH_BLOW else self.until


class Recovery(msgspec.Struct, frozen=True):
    """From one kind of fault; times in milliseconds."""

    n_faults: int
    n_streams: int
    n_interrupted: int
    """More streams that were hit again before they moved."""
    p50_ms: float
    p99_ms: float
    max_ms: float
    bound_ms: float
    """Of `p99_ms`."""
    stall_p99_ms: float
    """From the blow."""

    @property
    def is_within_bound(self) -> bool:
        """Whether p99 is."""
        return self.p99_ms <= self.bound_ms


def recoveries(lives: Iterable[Life], faults: Sequence[Struck]) -> dict[str, Recovery]:
    """By kind of fault; kinds that hit no stream are left out."""
    waits: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    n_interrupted: Counter[str] = Counter()
    ordered = sorted(faults, key=lambda fault: fault.at)
    for stream in streams_of(lives):
        for fault, interrupted_at in stream.blows(ordered):
            moved_at = min(stream.moved_after(fault), interrupted_at)
            waited_s = moved_at - fault.counts_from
            if interrupted_at == moved_at < math.inf and waited_s <= BOUND_S[fault.kind]:
                n_interrupted[fault.kind] += 1
            else:
                waits[fault.kind].append((max(0.0, waited_s), moved_at - fault.at))
    n_faults = Counter[str](fault.kind for fault in faults)
    return {
        kind: _recovery(n_faults[kind], n_interrupted[kind], waits[kind], bound_s)
        for kind, bound_s in BOUND_S.items()
        if kind in waits
    }


def streams_of(lives: Iterable[Life]) -> list["Stream"]:
    """Those that somebody watched to their end."""
    return [
        Stream(life)
        for life in lives
        if life.invoked and life.invoked[0].is_streamed and not (life.is_excused and not life.ended)
    ]


class Stream:
    """When one stream moved, and who moved it."""

    def __init__(self, life: Life) -> None:
        self.client = life.invoked[0].op.split(":")[0]
        self.begun_at = life.invoked[0].at
        moves = [*life.progressed, *life.ended[:1]]
        self._times = [each.at for each in moves]
        self._workers = [each.worker for each in moves]
        self.ended_at = life.ended[0].at if life.ended else math.inf

    @property
    def first_token_at(self) -> float:
        """Or its outcome, if no token came; infinite without any."""
        return next(iter(self._times), math.inf)

    def blows(self, faults: Sequence[Struck]) -> Iterable[tuple[Struck, float]]:
        """Faults that hit it, and when another interrupted its wait; infinite if none did.

        Args:
            faults: in the order in which they struck.
        """
        for fault in _between(faults, self.begun_at, self.ended_at):
            if fault.kind in BOUND_S and self._is_hit_by(fault) and self._waits_after(fault):
                yield fault, self.interrupted_at(fault, faults)

    def moved_after(self, fault: Struck) -> float:
        """When it had recovered; infinite if it never did."""
        place = self._place_after(fault)
        return self._times[place] if place < len(self._times) else math.inf

    def interrupted_at(self, fault: Struck, faults: Sequence[Struck]) -> float:
        """When a blow came, or was there already, from which recovery begins later.

        Args:
            fault: that hit it.
            faults: all, in the order in which they struck.
        """
        place = self._place_after(fault)
        moved_at = self._times[place] if place < len(self._times) else math.inf
        mover = self._workers[place] if place < len(self._workers) else ""
        # An earlier blow may have moved it to that worker already.
        before = bisect_left(self._times, fault.at)
        waits_from = self._times[before - 1] if before else self.begun_at
        return min(
            (
                max(fault.at, other.at)
                for other in _between(faults, fault.at - LONGEST_S, moved_at)
                if other.counts_from > fault.counts_from
                and (self._is_hit_by(other) or _is_in_the_way(other, mover, waits_from))
            ),
            default=math.inf,
        )

    def is_cut_off(self, faults: Iterable[Struck], begin: float, end: float) -> bool:
        """Whether its client's link was broken at some time between."""
        return any(
            fault.kind == "partition_client"
            and fault.victim == self.client
            and fault.at < end
            and fault.until > begin
            for fault in faults
        )

    def _is_hit_by(self, fault: Struck) -> bool:
        if fault.kind in ROUTER_KINDS:
            return True
        if fault.kind == "partition_client":
            return self.client == fault.victim
        before = bisect_left(self._times, fault.at)
        return before > 0 and self._workers[before - 1] == fault.victim

    def _waits_after(self, fault: Struck) -> bool:
        """Whether it was still open when recovery could begin."""
        in_flight_until = fault.at + IN_FLIGHT_S
        return self.ended_at >= max(fault.counts_from, in_flight_until)

    def _place_after(self, fault: Struck) -> int:
        return bisect_right(self._times, max(fault.counts_from, fault.at + IN_FLIGHT_S))


def _is_in_the_way(other: Struck, mover: str, at: float) -> bool:
    """Whether it hit the worker that went on with a stream waiting since `at`."""
    return other.victim == mover and other.at > at - FROZEN_NOTICED_S and other.until > at


def _between(faults: Sequence[Struck], begin: float, end: float) -> Sequence[Struck]:
    first = bisect_right(faults, begin, key=lambda fault: fault.at)
    return faults[first : bisect_left(faults, end, key=lambda fault: fault.at)]


def _recovery(
    n_faults: int, n_interrupted: int, waits: list[tuple[float, float]], bound_s: float
) -> Recovery:
    recovered = sorted(wait_s for wait_s, _ in waits)
    return Recovery(
        n_faults=n_faults,
        n_streams=len(waits),
        n_interrupted=n_interrupted,
        p50_ms=in_ms(percentile(recovered, 0.5)),
        p99_ms=in_ms(percentile(recovered, 0.99)),
        max_ms=in_ms(recovered[-1]),
        bound_ms=in_ms(bound_s),
        stall_p99_ms=in_ms(percentile(sorted(stall_s for _, stall_s in waits), 0.99)),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def in_ms(seconds: float) -> float:
    """Rounded; JSON has no infinity."""
    return round(seconds * 1e3, 1) if seconds < math.inf else 1e12
