"""Router cores under simulated faults are repeated to the letter by fresh ones; mutants differ.

The turns go through the journal's own records, so that what is compared is what a file would hold.
"""

from functools import partial

import msgspec
import pytest

from rolloutbus.bus.streams.tap import Outcome, Stimulus
from rolloutbus.replay.journal.records import Record, Router, TurnRecord, payload_of, record_in
from rolloutbus.replay.turn_player import Begin, CorePlayer, Repeat
from rolloutbus.router.core import RouterCore
from rolloutbus.router.recording import recorded, repeat
from rolloutbus.router.settings import RouterSettings
from tests.drills.simulation.process import BACK, FRONT, Process
from tests.drills.simulation.scenario import Scenario
from tests.drills.simulation.sim_router import RouterNode
from tests.drills.simulation.world import World

SETTINGS = RouterSettings(FRONT, BACK)
SCENARIO = Scenario(faults_s=40.0)


class Scribe:
    """Keeps the turns of one router as a journal would."""

    def __init__(self, instance: str) -> None:
        text = msgspec.json.encode(SETTINGS).decode()
        self.payloads = [payload_of(Router(0, 0, "1", text, instance))]

    def began(self, settings: RouterSettings, instance: str, tap: str) -> None:
        """It is told when it is made."""

    def turn(self, stimulus: Stimulus, outcome: Outcome) -> None:
        n = len(self.payloads) - 1
        self.payloads.append(payload_of(TurnRecord(n + 1, 0, n, stimulus, outcome)))

    @property
    def records(self) -> list[Record]:
        found = [record_in(each) for each in self.payloads]
        return [each for each in found if isinstance(each, Router | TurnRecord)]


def run(seed: int) -> tuple[World, list[Scribe]]:
    """One run under faults; the turns of every router in it."""
    scribes: list[Scribe] = []

    def listen_in(process: Process) -> None:
        if isinstance(process, RouterNode):
            scribes.append(Scribe(process.core.context.instance))
            process.handle = recorded(process.core.handle, scribes[-1])

    world = World(seed, SCENARIO, listen_in)
    world.run()
    return world, scribes


def fresh(world: World, router: Router, n_draws: int = 1) -> RouterCore:
    """A core with the luck of the recorded one, which had left one draw to its process."""
    chance = world.time.chance(router.instance)
    settings = msgspec.json.decode(router.settings, type=RouterSettings)
    core = RouterCore(settings, router.instance, chance)
    for _ in range(n_draws):
        chance.random()
    return core


def played(scribe: Scribe, begin: Begin) -> CorePlayer:
    player = CorePlayer(begin)
    for record in scribe.records:
        player.play(record)
    return player


def _faithful(world: World, router: Router) -> Repeat:
    return partial(repeat, fresh(world, router).handle)


def _luckless(world: World, router: Router) -> Repeat:
    return partial(repeat, fresh(world, router, n_draws=2).handle)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", [3, 8, 21])
def test_a_fresh_core_repeats_every_turn_of_a_router_under_faults(seed: int) -> None:
    world, scribes = run(seed)
    players = [played(scribe, partial(_faithful, world)) for scribe in scribes]
    assert sum(player.n_turns for player in players) > 1000
    assert [player.first for player in players] == [None] * len(players)
    assert all(player.is_same for player in players)


@pytest.mark.simulation
def test_other_luck_shows_where_the_first_worker_is_chosen() -> None:
    world, scribes = run(8)
    player = played(scribes[0], partial(_luckless, world))
    assert player.first is not None
    sent = [entry.kind for _, said in player.first.turn.outcome.effects for entry in said or []]
    assert "generate" in sent


def _unfair(world: World, router: Router) -> Repeat:
    """A core that forgets to fence whoever holds what another has finished."""
    core = fresh(world, router)
    core.table.fence = lambda *_: None  # type: ignore[method-assign]
    return partial(repeat, core.handle)


@pytest.mark.simulation
def test_a_core_without_a_protection_differs_where_it_was_needed() -> None:
    world, scribes = run(2)
    players = [played(scribe, partial(_unfair, world)) for scribe in scribes]
    firsts = [player.first for player in players if player.first is not None]
    assert firsts
    for first in firsts:
        kinds = {entry.kind for _, said in first.turn.outcome.effects for entry in said or []}
        assert "fenced" in kinds
