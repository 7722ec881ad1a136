"""What a killed router means to its clients: when new requests are served, and when old ones are.

New requests are streams that were asked for after a kill and before the next fault of any kind was
a second away; they are told only of kills that came alone. Their wait begins when they are asked or
when the router is ready, whichever is later, and ends with the first token. Old ones were open when
it was killed.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from tests.drills.chaos.history import Life
from tests.drills.chaos.recovery import (
    IN_FLIGHT_S,
    Stream,
    Struck,
    in_ms,
    percentile,
    streams_of,
)

NEW_S = 1.0
"""A new request has its first token this long after the router is back, at the 99th percentile."""
WINDOW_S = 3.5
"""After the router is ready: as long as it may still be recovering. Also how long before a kill
there must have been no other fault, for its work to have found another place."""


class Waits(msgspec.Struct, frozen=True):
    """Milliseconds, and how many there were."""

    n: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class RouterRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """From all kills of the router; None: there was nothing to measure."""

    kills: int
    restart: Waits | None
    """From the kill to the ready line."""
    first_new: Waits | None
    """Of each kill: from its ready line to the first token of any new request."""
    new: Waits | None
    """Of each new request."""
    new_bound_ms: float
    old_moved: Waits | None
    """Of each old request: from the ready line to its next token or its outcome."""
    old_ended: Waits | None
    """Of each old request: from the ready line to its outcome, the rest of its tokens included."""


def router_recovery(lives: Iterable[Life], faults: Sequence[Struck]) -> RouterRecovery:
    """Measured from the history of a run."""
    faults = sorted(faults, key=lambda fault: fault.at)
    kills = [fault for fault in faults if fault.kind == "kill_router"]
    streams = streams_of(lives)
    new: list[float] = []
    first_new: list[float] = []
    old_moved: list[float] = []
    old_ended: list[float] = []
    for kill in kills:
        waits = _waits_of_new(kill, streams, faults) if _came_alone(kill, faults) else []
        new += waits
        first_new += [min(waits)] if waits else []
        for stream in streams:
            if stream.begun_at < kill.at < kill.until < stream.ended_at:
                moved_at = stream.moved_after(kill)
                if stream.interrupted_at(kill, faults) == math.inf:
                    old_moved.append(moved_at - kill.until)
                    old_ended.append(stream.ended_at - kill.until)
    return RouterRecovery(
        kills=len(kills),
        restart=_waits([kill.until - kill.at for kill in kills]),
        first_new=_waits(first_new),
        new=_waits(new),
        new_bound_ms=in_ms(NEW_S),
        old_moved=_waits(old_moved),
        old_ended=_waits(old_ended),
    )


def _came_alone(kill: Struck, faults: Sequence[Struck]) -> bool:
    return not any(
        kill.at - WINDOW_S < other.at < kill.until + NEW_S for other in faults if other is not kill
    )


def _waits_of_new(kill: Struck, streams: Sequence[Stream], faults: Sequence[Struck]) -> list[float]:
    next_at = min((other.at for other in faults if other.at > kill.at), default=math.inf)
    until = min(kill.until + WINDOW_S, next_at - NEW_S)
    return [
        max(0.0, stream.first_token_at - max(stream.begun_at, kill.until))
        for stream in streams
        if kill.at + IN_FLIGHT_S < stream.begun_at < until
        and not stream.is_cut_off(faults, stream.begun_at, stream.begun_at + NEW_S)
    ]


def _waits(found: list[float]) -> Waits | None:
    if not found:
        return None
    ordered = sorted(found)
    p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
    return Waits(len(ordered), in_ms(p50), in_ms(p99), in_ms(ordered[-1]))
