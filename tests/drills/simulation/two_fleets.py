"""One fleet after another at one address: the second goes on with nothing of the first."""

from random import Random
from typing import TYPE_CHECKING

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.trainer_adapter.client.core.known_fleet import names_version
from tests.drills.simulation.faults import AFTERMATH_S, ROUTER_AFTERMATH_S
from tests.drills.simulation.sim_worker import WorkerNode

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

WORKERS_S = (0.2, 3.0)
"""Workers of the second fleet come so long after the first one is gone."""
STORE_S = (1.0, 12.0)
"""So does its store: for 4 s of it a router only waits, after that it serves without a name."""


class TwoFleets:
    """Replaces the fleet once, and watches what the second one is given."""

    def __init__(self, world: "World", chance: Random) -> None:
        self.has_changed = False
        self._world, self._chance = world, chance
        self._former: set[WorkerNode] = set()
        self._former_name = ""
        self._begun: set[str] = set()
        """Requests that a worker of the second fleet began from the start."""

    def plan(self, between_s: tuple[float, float]) -> None:
        """The second fleet comes within this interval."""
        self._world.later(self._chance.uniform(*between_s), self._replace)

    def began(self, worker: WorkerNode, entry: Entry) -> None:
        """A worker gave a `generate` to its engine."""
        if not self.has_changed or worker in self._former:
            return
        body, world = unpack(entry), self._world
        assert isinstance(body, Generate)
        if body.prefix is None:
            self._begun.add(entry.rid)
        elif entry.rid not in self._begun:
            text = f"{worker.name} goes on with tokens of another fleet"
            world.oracles.broken("one_fleet", entry.rid, text)
        case = world.case(entry.rid)
        if case is None or case.fleet != self._former_name or case.ask.place is None:
            return
        if names_version(case.ask) or case.ask.place.session:
            text = f"{worker.name} serves what was asked of another fleet"
            world.oracles.broken("one_fleet", entry.rid, text)

    def _replace(self) -> None:
        world, chance = self._world, self._chance
        world.note("another fleet comes to the address")
        intent = world.record.intent
        self._former_name = intent.fleet if intent is not None else ""
        self._former = set(world.workers.values())
        self.has_changed = True
        world.routers.active.kill()
        world.store.kill()
        for name, worker in world.workers.items():
            worker.kill()
            world.health.touch(name, WORKERS_S[1] + AFTERMATH_S)
            world.later(chance.uniform(*WORKERS_S), lambda name=name: world.revive_worker(name))
        world.health.touch("router", ROUTER_AFTERMATH_S)
        world.forget_weights()
        world.later(chance.uniform(0.05, 1.0), world.routers.revive)
        world.later(chance.uniform(*STORE_S), world.revive_store)
