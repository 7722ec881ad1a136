"""A commit in waves that a router does not live to finish."""

import asyncio

import pytest
import torch

from rolloutbus import Fleet, RolloutClient, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    UNHURRIED,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
    status_when,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [4, 5, 6]
N_TOKENS = 3
WEIGHTS = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
FLEET: UpOptions = {
    "workers": 3,
    "engine": "fake",
    "engine_options": {"slots": 8, "step_s": 0.02, "max_context": 2 * ENDLESS},
    # The next router has to be there before a lease is over: with it, its rollouts would end.
    "lease": UNHURRIED,
}


async def all_busy(fleet: Fleet, client: RolloutClient) -> list[Streamed]:
    """Endless rollouts, at least one on each worker."""
    streams: list[Streamed] = []
    while {each.worker for each in streams} != set(fleet.worker_names):
        streams.append(Streamed(client, PROMPT, fake_sampling(ENDLESS), deadline_s=240))
        await streams[-1].reached(1)
    return streams


async def test_workers_whose_turn_has_not_come_serve_under_the_next_router(
    fleet: Fleet, client: RolloutClient
) -> None:
    streams = await all_busy(fleet, client)
    before = await client.status()
    n_workers = len(before.workers)
    handle = WeightPublisher(client).start(
        WEIGHTS, floor=2, in_flight="finish_old", deadline_s=4 * DEADLINE_S
    )
    async for progress in handle.changes():
        if progress.phase == "committing":  # until the rollouts of the first wave have ended
            break
    fleet.kill_router()
    await status_when(
        client,
        lambda now: now.instance != before.instance and len(now.workers) == n_workers,
    )
    rollout = await client.generate(
        PROMPT, fake_sampling(N_TOKENS), versions="exact:0", deadline_s=DEADLINE_S
    )
    assert rollout.version_runs == [(0, N_TOKENS)]
    assert_fake_rollout(PROMPT, rollout, N_TOKENS)

    await asyncio.gather(*(each.cut() for each in streams))
    published = await handle
    assert sorted(published.stall_ms) == fleet.worker_names
    after = await client.status()
    assert after.committed == {"default": published.version}
    assert {each.version for each in after.workers} == {published.version}
