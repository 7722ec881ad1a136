"""One fault of each kind, right after each of the messages of a short run."""

from dataclasses import replace

import pytest

from drills.simulation.faults import FAULTS
from drills.simulation.runs import run_seed
from drills.simulation.scenario import SMALL
from drills.simulation.world import World

SEED = 1
BEGIN_S, END_S = 2.5, 11.0
"""From the first lease to the last request: what happens in between is hit."""
STRIDE = 3
AFTERWARDS_S = 1e-6


def _moments() -> list[float]:
    """When each message arrives in the run without a fault, in seconds from its start."""
    world = World(SEED, SMALL)
    start = world.time.now
    world.run()
    moments = (moment - start for moment in world.time.moments)
    return [moment for moment in moments if BEGIN_S < moment < END_S]


def test_the_run_is_quiet_without_a_fault() -> None:
    assert run_seed(SEED, SMALL).violations == []


def test_enough_happens_to_be_hit() -> None:
    assert len(_moments()) >= 200


@pytest.mark.simulation
@pytest.mark.parametrize("kind", FAULTS)
def test_a_single_fault_at_any_moment_loses_nothing(kind: str) -> None:
    for moment in _moments()[::STRIDE]:
        scenario = replace(SMALL, fault=(kind, moment + AFTERWARDS_S))
        assert run_seed(SEED, scenario).violations == [], f"{kind} at {moment:.6f}"
