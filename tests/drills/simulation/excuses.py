"""Why a request may end without tokens, and when: whatever has no reason here is a fault.

Promise: each request ends once, as asked, unless its own deadline, its own policy on losses, the
weights it insists on, or its engine stand against it.
"""

from typing import TYPE_CHECKING

from rolloutbus.bus.wire.errors import (
    DeadlineExceeded,
    EngineFailed,
    OtherFleet,
    PeerLost,
    Refused,
    RequestExpired,
    StaleVersion,
)
from tests.drills.simulation.detached import is_lost_for_good
from tests.drills.simulation.sim_client import Case

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

IMPATIENT_S = 20.0
"""A request with less time than this may run out of it: an engine takes up to 6 s to start and
15 s to sample, a partition lasts 6 s."""
LATE_WEIGHTS_S = 30.0
"""The same for one that waits for new weights: all who waited queue up where they are. To that
comes the time for which some workers were behind: these get no requests, and a version may be
published when one worker has it."""
MANY_RUNS = 2
"""Whoever has begun so often may run out of 60 s: a slow engine lets a request wait for 16 s and
samples for 16 s, each time."""
LONG_FREEZE_S = 15.0
"""So may one whose engine stood still, or whose fleet was paused or had no router, for so long."""
EARLY_S = 0.01
"""Deadlines travel as whole milliseconds."""
POISON_CODES = ("poison", "engine_crashed")
"""The router's verdict, or the client's own where restarts have made the router forget."""


def is_impatient(case: Case) -> bool:
    """Whether its caller gave it little time."""
    return case.deadline_at - case.asked_at < IMPATIENT_S


def excuse(world: "World", rid: str, case: Case, outcome: object) -> str:
    """The name of the reason; empty if there is none."""
    if isinstance(outcome, OtherFleet):
        return "other_fleet" if world.two_fleets.has_changed else ""
    if case.is_attached and _is_loss(outcome):
        # Old word of a loss may come twice, and who attaches (again) knows of no execution by then.
        is_echo = world.is_unreliable and isinstance(outcome, PeerLost | Refused)
        return "detached_lost" if is_echo or is_lost_for_good(world, rid, case) else ""
    match outcome:
        case EngineFailed(problem=problem) if problem.code in POISON_CODES:
            return "poison_found" if rid == world.workload.poisoned else ""
        case EngineFailed():
            return "engine_failed" if rid in world.oracles.failed_by_engine else ""
        case PeerLost():
            return "failed_on_loss" if case.ask.on_loss == "fail" and case.was_lost else ""
        case StaleVersion() | Refused(code="not_ready") | DeadlineExceeded() | RequestExpired():
            pass
        case _:
            return ""
    if isinstance(outcome, StaleVersion) and _is_retired(world, case):
        return "version_retired"
    if case.ended_at < case.deadline_at - EARLY_S:
        return ""  # time heals these until the deadline
    if _lacks_weights(world, rid, case):
        return "version_unavailable"
    return "expired" if is_impatient(case) or _was_unlucky(world, rid, case) else ""


def _is_loss(outcome: object) -> bool:
    """Whether nobody has a detached request any more."""
    match outcome:
        case EngineFailed(problem=problem):
            return problem.code == "worker_lost"
        case Refused(code=code):
            return code == "unknown_request"
        case _:
            return isinstance(outcome, PeerLost)


def _was_unlucky(world: "World", rid: str, case: Case) -> bool:
    n_runs = len(world.oracles.runs.get(rid, ()))
    unsettled_s = world.pair_oracles.unsettled(case.asked_at, case.ended_at)
    held_up_s = world.frozen_s[rid] + world.pauses.lasted_s + unsettled_s
    return n_runs >= MANY_RUNS or held_up_s >= LONG_FREEZE_S


def _is_retired(world: "World", case: Case) -> bool:
    """Whether it asks for exactly the weights that others were committed after."""
    retired_at = world.fleet_oracles.retired_at
    versions = case.ask.place.versions if case.ask.place else ""
    return versions == "exact:0" and retired_at is not None and retired_at < case.ended_at


def _lacks_weights(world: "World", rid: str, case: Case) -> bool:
    """Whether the weights it insists on came too late for it, or are not served any more."""
    retired_at = world.fleet_oracles.retired_at
    published_at = world.workload.published_at
    match case.ask.place.versions if case.ask.place else "":
        case "exact:0":
            return retired_at is not None and retired_at < case.ended_at
        case "min:1" | "exact:1":
            needs_s = LATE_WEIGHTS_S + world.frozen_s[rid] + world.pauses.lasted_s + case.behind_s
            return published_at is None or published_at > case.deadline_at - needs_s
        case _:
            return False
