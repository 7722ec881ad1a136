"""Weights that are finite and overflow: requests end with the reason, the engine does not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from rolloutbus import Fleet, RolloutClient, Sampling, WeightPublisher
from rolloutbus.errors import EngineFailed
from tests.integration.drills import Streamed
from tests.integration.reference import Reference, Weights
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.models import ENDLESS
from tests.sglang.processes import scheduler_pids

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

PROMPT = [5, 6, 7]
HUGE = 3e38
KINDS = {
    "alone": Sampling(max_new_tokens=4, ignore_eos=True),
    "truncated": Sampling(max_new_tokens=4, top_k=5, top_p=0.9, min_p=0.01, ignore_eos=True),
    "greedy": Sampling(max_new_tokens=4, temperature=0.0, ignore_eos=True),
    "with rules": Sampling(max_new_tokens=4, repetition_penalty=1.5, ignore_eos=True),
}


@pytest_asyncio.fixture(loop_scope="session")
async def sound(client: RolloutClient, llama: Path) -> AsyncIterator[Weights]:
    """The weights of the fleet, which it has again afterwards."""
    weights: Weights = dict(Reference(llama).model.named_parameters())
    yield weights
    await WeightPublisher(client).publish(weights, require="all", deadline_s=DEADLINE_S)
    while (await client.status()).troubled:  # its breaker wants to see requests that end well
        await client.generate(PROMPT, KINDS["greedy"], deadline_s=DEADLINE_S)


@pytest.mark.parametrize("hurt", ["lm_head.weight", "model.layers.0.mlp.down_proj.weight"])
async def test_requests_of_overflowing_weights_fail_and_the_engine_lives(
    fleet: Fleet, client: RolloutClient, sound: Weights, hurt: str
) -> None:
    before = scheduler_pids(fleet)
    broken = {**sound, hurt: torch.full_like(sound[hurt], HUGE)}
    running = Streamed(client, PROMPT, Sampling(max_new_tokens=ENDLESS, ignore_eos=True))
    await running.reached(10)

    await WeightPublisher(client).publish(broken, require="all", deadline_s=DEADLINE_S)
    with pytest.raises(EngineFailed, match="no numbers"):
        await running.rollout()
    asked = [client.generate(PROMPT, each, deadline_s=DEADLINE_S) for each in KINDS.values()]
    ended = await asyncio.gather(*asked, return_exceptions=True)

    for name, error in zip(KINDS, ended, strict=True):
        assert isinstance(error, EngineFailed), (name, error)
        assert "no numbers" in str(error), name
        assert error.code == "engine_failed"
    assert scheduler_pids(fleet) == before
    await WeightPublisher(client).publish(sound, require="all", deadline_s=DEADLINE_S)
    rollout = await client.generate(PROMPT, KINDS["greedy"], deadline_s=DEADLINE_S)
    assert len(rollout.tokens) == 4
