"""Whoever takes part in a weight update dies once in each of its phases, by each transport."""

from dataclasses import replace
from typing import get_args

import msgspec

from rolloutbus.bus.wire.messages.weights import Transport, UpdateMode
from tests.drills.simulation.ambush import PHASES
from tests.drills.simulation.scenario import SMALL, publication_by
from tests.drills.simulation.verdict import judge
from tests.drills.simulation.watch import UpdatePhase
from tests.drills.simulation.world import World

SEED = 1
WAYS: tuple[tuple[Transport, UpdateMode], ...] = (
    *((transport, "staged") for transport in get_args(Transport)),
    ("shm", "overwrite"),
    ("tcp", "overwrite"),
)
VICTIMS = {
    "trainer": "restart_client",
    "store": "restart_store",
    "worker": "kill_worker",
    "engine host": "kill_host",
    "router": "restart_router",
}
"""Who dies -> how."""


class UpdateFault(msgspec.Struct, frozen=True):
    """Who dies when, and what follows."""

    victim: str
    phase: UpdatePhase
    transport: Transport
    mode: UpdateMode
    has_struck: bool
    violations: list[str]


def run_update_fault(
    victim: str, phase: UpdatePhase, transport: Transport, mode: UpdateMode
) -> UpdateFault:
    """One short run with this one fault."""
    publication = msgspec.structs.replace(publication_by(transport), mode=mode)
    world = World(SEED, replace(SMALL, publication=publication))
    world.ambushes.lay_at(phase, VICTIMS[victim])
    world.run()
    report = judge(world)
    has_struck = report.sometimes[f"hit_{phase}"] == 1
    violations = [str(each) for each in report.violations]
    return UpdateFault(victim, phase, transport, mode, has_struck, violations)


class BrokenWaves(msgspec.Struct, frozen=True):
    """What became of a commit in waves whose trainer and router died."""

    n_resumed: int
    """Times that a new router went on with them, and not the trainer's successor."""
    are_over: bool
    """The store knows that they are through."""
    violations: list[str]


def run_broken_waves(seed: int, phases: tuple[UpdatePhase, UpdatePhase]) -> BrokenWaves:
    """One short run in which the trainer dies in the first phase and the router in the second."""
    publication = msgspec.structs.replace(publication_by("shm"), floor=2)
    world = World(seed, replace(SMALL, publication=publication, n_workers=4))
    world.ambushes.lay_at(phases[0], "restart_client")
    world.ambushes.lay_at(phases[1], "restart_router")
    world.run()
    report = judge(world)
    violations = [str(each) for each in report.violations]
    n_resumed = report.sometimes.get("resumed_waves", 0)
    return BrokenWaves(n_resumed, not world.record.waves, violations)


def run_update_faults(transport: Transport, mode: UpdateMode) -> list[UpdateFault]:
    """All victims in all phases."""
    return [
        run_update_fault(victim, phase, transport, mode) for victim in VICTIMS for phase in PHASES
    ]
