"""Faults that wait until a weight update has come to a certain point."""

from random import Random
from typing import TYPE_CHECKING

from tests.drills.simulation.faults import (
    cut_worker,
    kill_host,
    kill_worker,
    restart_client,
    restart_router,
    restart_store,
)
from tests.drills.simulation.watch import UpdatePhase

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

PHASES: tuple[UpdatePhase, ...] = ("prepare", "transfer", "staged", "record", "commit", "swap")
BLOWS = ("kill_worker", "kill_host", "cut_worker", "restart_router", "restart_store")
AT_THE_STORE = ("restart_router", "restart_store", "cut_worker")
"""While the decision is being recorded no worker is in the middle of anything."""


class Ambushes:
    """What waits; each strikes once, at the first update that comes its way."""

    def __init__(self, world: "World", chance: Random) -> None:
        self._world, self._chance = world, chance
        self._waiting: list[tuple[UpdatePhase, str]] = []

    def lay(self, chance: Random) -> None:
        """Draw when to strike and how."""
        phase = chance.choice(PHASES)
        self._waiting.append((phase, chance.choice(AT_THE_STORE if phase == "record" else BLOWS)))

    def lay_at(self, phase: UpdatePhase, blow: str) -> None:
        """Strike then and so."""
        self._waiting.append((phase, blow))

    def spring(self, phase: UpdatePhase, victim: str) -> None:
        """An update has come so far at a worker or the store."""
        waiting = [] if self._world.is_calm else self._waiting
        ambush = next((each for each in waiting if each[0] == phase), None)
        if ambush is not None:
            self._waiting.remove(ambush)
            self._world.later(0.0, lambda: self._strike(*ambush, victim))

    def _strike(self, phase: UpdatePhase, blow: str, victim: str) -> None:
        world, chance = self._world, self._chance
        world.note(f"while the update is at {phase!r} of {victim}:")
        world.oracles.seen[f"hit_{phase}"] += 1
        worker = victim if victim in world.workers else ""  # none is in the middle of a record
        match blow:
            case "kill_worker":
                kill_worker(world, chance, worker)
            case "kill_host":
                kill_host(world, chance, worker)
            case "restart_client":
                restart_client(world, chance)
            case "cut_worker":
                cut_worker(world, chance, victim)
            case "restart_router":
                restart_router(world, chance)
            case _:
                restart_store(world, chance)
