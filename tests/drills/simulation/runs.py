"""Running one seed."""

import gc

from tests.drills.simulation.scenario import SWARM, Scenario
from tests.drills.simulation.story import Story
from tests.drills.simulation.verdict import Report, judge
from tests.drills.simulation.world import Tamper, World


def run_seed(
    seed: int,
    scenario: Scenario = SWARM,
    tamper: Tamper | None = None,
    story: Story | None = None,
) -> Report:
    """One whole run and its verdict."""
    was_enabled = gc.isenabled()
    gc.disable()  # a run makes no cycles worth looking for, and looking costs a fifth of it
    try:
        world = World(seed, scenario, tamper, story)
        world.run()
        return judge(world)
    finally:
        if was_enabled:
            gc.enable()
