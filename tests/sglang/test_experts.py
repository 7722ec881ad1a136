"""Experts that the real SGLang sent each place to are those of a plain forward pass."""

import asyncio
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import Rollout, RolloutClient, SamplingParams, Want
from rolloutbus.errors import ProcessFailed
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.gpu.tiny import (
    N_CHOSEN,
    SHAPE,
    VOCAB_SIZE,
    error_of,
    experts_of,
    load_tiny,
    save_tiny,
    share_of_same,
)
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.models import SLOTS

TOLERANCE = 1e-4
CHUNK = 128
"""The longest prompt is computed in several steps."""
SAMPLING = SamplingParams(max_new_tokens=24, temperature=1.0, ignore_eos=True)
WANTS_CUDA = "Torch not compiled with CUDA"
WANT = Want(routed_experts=True)
LENGTHS = {5: 4, 40: 60, 7: 300}
"""Of prompts, by their first token."""
PROMPTS = [[(n + i) % VOCAB_SIZE for i in range(length)] for n, length in LENGTHS.items()]


async def sample_all(client: RolloutClient) -> list[Rollout]:
    asked = [client.generate(each, SAMPLING, want=WANT, deadline_s=DEADLINE_S) for each in PROMPTS]
    return await asyncio.gather(*asked)


async def test_routed_experts_are_those_of_each_place(tmp_path: Path) -> None:
    path = save_tiny("experts", tmp_path / "model")
    options = fleet_of(
        path,
        enable_return_routed_experts=True,
        max_total_tokens=SLOTS * 512,
        chunked_prefill_size=CHUNK,
    )
    try:
        async with rolloutbus.up(**options) as fleet:
            settings = ClientSettings(name="experts", router=fleet.address, overtime_s=DEADLINE_S)
            async with RolloutClient(settings) as client:
                # The second time the prompts are in the cache.
                rollouts = [rollout for _ in range(2) for rollout in await sample_all(client)]
                without = await client.generate(PROMPTS[0], SAMPLING, deadline_s=DEADLINE_S)
    except ProcessFailed as failed:
        if WANTS_CUDA not in str(failed):
            raise
        pytest.skip("this SGLang registers the memory for it with CUDA, whatever the device")

    assert "routed_experts" not in without.arrays
    model = load_tiny(path)
    for prompt, rollout in zip(PROMPTS * 2, rollouts, strict=True):
        assert error_of(model, prompt, rollout) < TOLERANCE
        told = rollout.arrays["routed_experts"]
        assert told.shape == (
            len(prompt) + len(rollout.tokens) - 1,
            SHAPE["num_hidden_layers"],
            N_CHOSEN,
        )
        assert share_of_same(told, experts_of(model, prompt, rollout)) == 1.0
