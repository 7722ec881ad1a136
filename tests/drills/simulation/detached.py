"""Detached requests of clients that died: collected by who comes next, or lost for a good reason.

Promise: each ends once, for the process that asked or for a later one of its name, and whoever is
told of its end twice, because the first one died before it could acknowledge, is told the same.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from rolloutbus.bus.wire.errors import DeadlineExceeded, PeerLost, Refused
from rolloutbus.trainer_adapter.client.core.results import Rollout
from tests.drills.simulation.sim_client import Case, ClientNode

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

SOON_S = 12.0
"""A client that died so soon after the end of a router, or the loss of a request, may not have sent
it again, and one that died so soon after the end of a request may not have said that it has it."""


def lives_of(world: "World", name: str) -> list[ClientNode]:
    """All processes of a client's name, the present one last."""
    dead = [each for each in world.dead if isinstance(each, ClientNode) and each.name == name]
    return [*dead, world.clients[name]]


def known_before(world: "World", name: str) -> dict[str, Case]:
    """All detached requests of a name's earlier processes: what a new one may find."""
    *dead, _ = lives_of(world, name)
    cases = (each for client in dead for each in client.cases.items())
    return {rid: case for rid, case in cases if case.is_detached}


def left_behind(world: "World", name: str) -> dict[str, Case]:
    """Detached requests of a name that may be kept for it, and nobody waits for."""
    found: dict[str, Case] = {}
    for client in lives_of(world, name):
        for rid, case in client.cases.items():
            if not case.is_detached:
                continue
            may_be_kept = not case.outcomes or client.ended_at - case.ended_at < SOON_S
            if _is_given_up(case) or (may_be_kept and not client.is_alive):
                found[rid] = case
            else:
                found.pop(rid, None)
    return found


def kept_twice(world: "World") -> set[str]:
    """Detached requests that may be kept although they are over.

    Word of that is said once on each link, and some frames are dropped on links that stay.
    """
    if not world.drops_frames:
        return set()
    lives = (life for name in world.clients for life in lives_of(world, name))
    cases = (each for life in lives for each in life.cases.items())
    return {rid for rid, case in cases if case.is_detached and case.outcomes}


def judge_detached(world: "World") -> None:
    """What became of the detached requests of those that died."""
    for name in world.clients:
        lives = lives_of(world, name)
        by_rid: defaultdict[str, list[Case]] = defaultdict(list)
        for client in lives:
            for rid, case in [*client.given_up, *client.cases.items()]:
                if case.is_detached:
                    by_rid[rid].append(case)
        for rid, cases in by_rid.items():
            _judge(world, rid, cases)


def is_lost_for_good(world: "World", rid: str, case: Case) -> bool:
    """Whether those who knew of it are gone or away, or it ended for an earlier process."""
    first = next(each for each in lives_of(world, case.client.name) if rid in each.cases)
    endangered_at = first.ended_at - SOON_S
    earlier = first.cases[rid]
    deaths = [each.ended_at for each in world.routers.all if each.ended_at <= world.time.now]
    is_nowhere = case.was_lost or not world.oracles.runs.get(rid)
    return (
        earlier.was_aborted
        or (earlier is not case and bool(earlier.outcomes))
        or any(endangered_at < at for at in deaths)
        or endangered_at < first.told_lost_at.get(rid, 0.0)
        or (is_nowhere and any(case.asked_at < at for at in deaths))
        or any(not worker.is_alive for worker in world.oracles.holders.get(rid, ()))
    )


def _judge(world: "World", rid: str, cases: list[Case]) -> None:
    outcomes = [outcome for case in cases for outcome in case.outcomes]
    results = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
    if len({(each.tokens.tobytes(), tuple(each.version_runs)) for each in results}) > 1:
        world.oracles.broken("one_outcome", rid, "ended differently for two processes")
    if outcomes or not world.routers.has_heard_of(rid):
        return
    if is_lost_for_good(world, rid, cases[-1]):
        world.oracles.seen["detached_lost"] += 1
    else:
        world.oracles.broken("detached_ends", rid, "nobody heard of its end")


def _is_given_up(case: Case) -> bool:
    """Whether its caller stopped waiting, or was sent away, before it ended."""
    outcome = case.outcomes[-1] if case.outcomes else None
    is_unknown = isinstance(outcome, Refused) and outcome.code == "unknown_request"
    return is_unknown or isinstance(outcome, DeadlineExceeded | PeerLost)
