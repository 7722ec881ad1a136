"""A trainer that pauses the fleet and has it go on: between the two nobody begins anything."""

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

import msgspec

from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import Pause, Resume
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from tests.drills.simulation.sim_client import Case, ClientNode

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

PAUSE_DEADLINE_S = 20.0
LOOK_S = 0.1
"""How soon after its end a trainer learns of it."""


class Then(Protocol):
    """What follows when a command has ended."""

    def __call__(self, *, is_done: bool) -> None:
        """Go on."""
        ...


class Pauses:
    """Pauses of one run, one after another, and the oracle that watches over them."""

    def __init__(self, world: "World", chance: Random) -> None:
        self._world, self._chance = world, chance
        self._paused_at: float | None = None
        """Since when a pause is acknowledged and nobody has asked to go on."""
        self.lasted_s = 0.0
        """So long a request may have been held up by it."""

    def plan(self, bounds: tuple[float, float]) -> None:
        """One pause, which begins and ends within so many seconds of the run."""
        first_s, last_s = bounds
        begin_s = self._chance.uniform(first_s, (first_s + last_s) / 2)
        end_s = self._chance.uniform(begin_s + 1, last_s)
        self._world.later(begin_s, partial(self._pause, begin_s, end_s))

    def began(self, worker: str, entry: Entry) -> None:
        """A worker gave a `generate` to its engine."""
        if self._paused_at is not None:
            since_s = self._world.time.now - self._paused_at
            text = f"{worker} begins {since_s:.2f} s after the fleet was paused"
            self._world.oracles.broken("pause_holds", entry.rid, text)

    def _pause(self, begin_s: float, end_s: float) -> None:
        self._ask("pause", Pause("in_place"), partial(self._pause_ended, begin_s, end_s))

    def _pause_ended(self, begin_s: float, end_s: float, *, is_done: bool) -> None:
        left_s = end_s - self._world.elapsed_s
        if is_done and left_s > 0:
            self._paused_at = self._world.time.now
            self._world.oracles.seen["pauses"] += 1
            self._world.note("the fleet is paused")
            self._world.later(left_s, partial(self._resume, begin_s))
        elif left_s > 0:
            self._pause(begin_s, end_s)
        else:
            self._resume(begin_s)

    def _resume(self, begin_s: float) -> None:
        if self._paused_at is not None:
            self._world.note("the fleet goes on")
        self._paused_at = None
        self._ask("resume", Resume(), partial(self._resume_ended, begin_s))

    def _resume_ended(self, begin_s: float, *, is_done: bool) -> None:
        if is_done:
            self.lasted_s = self._world.elapsed_s - begin_s
        else:
            self._resume(begin_s)

    def _ask(self, kind: str, body: msgspec.Struct, then: Then) -> None:
        client = self._world.clients["c0"]
        if client.is_alive and not client.is_frozen:
            rid = client.ask(Ask(kind, body, route=FLEET), PAUSE_DEADLINE_S)
            self._look(client, client.cases[rid], then)
        else:
            self._world.later(LOOK_S, partial(then, is_done=False))

    def _look(self, client: ClientNode, case: Case, then: Then) -> None:
        if case.outcomes or not client.is_alive:
            then(is_done=any(isinstance(each, FleetResult) for each in case.outcomes))
        else:
            self._world.later(LOOK_S, partial(self._look, client, case, then))
