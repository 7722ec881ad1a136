"""Workers follow the queue: as many as the requests need that run or wait, within two bounds.

Run it with `python -m rolloutbus.examples.autoscale`: a burst of rollouts on fake engines. The rule
is in `wanted`, and knows nothing of how workers are started.
"""

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.errors import ProcessFailed
from rolloutbus.types import FleetStatus


class Rule(NamedTuple):
    """How many workers there are to be."""

    least: int = 1
    most: int = 4
    full: float = 0.8
    """Share of the workers' slots that is to be in use."""
    look_s: float = 0.5
    """Between two looks at the queue."""
    patience: int = 6
    """Looks in a row that must ask for fewer workers before any leaves: a lull is no end."""


def wanted(status: FleetStatus, rule: Rule) -> int:
    """Workers that the requests of this moment need."""
    slots = max((worker.slots for worker in status.workers), default=1)
    demand = status.n_queued + status.n_running
    return min(max(math.ceil(demand / (slots * rule.full)), rule.least), rule.most)


async def follow(
    fleet: Fleet, client: RolloutClient, rule: Rule, tell: Callable[[str], None] = print
) -> None:
    """Scale the fleet to its queue until cancelled: up at once, down when it stays short."""
    low = 0
    while True:
        status = await client.status()
        n_now, n_wanted = len(fleet.worker_names), wanted(status, rule)
        low = low + 1 if n_wanted < n_now else 0
        if n_wanted > n_now or low >= rule.patience:
            tell(f"{status.n_queued} wait, {status.n_running} run: {n_now} -> {n_wanted} workers")
            try:
                await fleet.scale(n_wanted)
            except ProcessFailed as error:  # no memory, say: the others go on
                tell(f"a new worker failed: {error}")
            low = 0
        await asyncio.sleep(rule.look_s)


async def main(n_rollouts: int = 400, rule: Rule | None = None) -> None:
    """A burst of rollouts, then silence."""
    rule = rule or Rule(look_s=0.2, patience=3)
    options = {"slots": 8, "step_s": 0.02}
    async with (
        rolloutbus.up(engine="fake", workers=rule.least, engine_options=options) as fleet,
        rolloutbus.connect(fleet.address) as client,
        asyncio.TaskGroup() as tasks,
    ):
        following = tasks.create_task(follow(fleet, client, rule))
        prompts = [[1, index] for index in range(n_rollouts)]
        sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
        groups = await client.generate_batch(prompts, sampling, deadline_s=120)
        print(f"{sum(len(group) for group in groups)} rollouts, all of them whole")
        await asyncio.sleep(2 * rule.patience * rule.look_s)  # the queue stays empty
        print(f"workers that are left: {len(fleet.worker_names)}")
        following.cancel()


if __name__ == "__main__":
    asyncio.run(main())
