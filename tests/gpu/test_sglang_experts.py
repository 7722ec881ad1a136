"""Experts that the real SGLang sent each place to, on a GPU, against a plain forward pass."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rolloutbus import RolloutClient, SamplingParams, Want
from tests.gpu.gpu_fleets import DEADLINE_S, gpu_fleet, running
from tests.gpu.tiny import (
    FAR,
    N_CHOSEN,
    NEAR,
    SHAPE,
    error_of,
    experts_of,
    load_tiny,
    save_tiny,
    share_of_same,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING = SamplingParams(max_new_tokens=64, temperature=1.0, ignore_eos=True)
WANT = Want(routed_experts=True)
N_LAYERS = SHAPE["num_hidden_layers"]
N_REQUESTS = 24
SAME = 0.85
"""Share of places whose experts bfloat16 does not change; other experts agree in a few percent."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[RolloutClient, Any]]:
    path = save_tiny("experts", tmp_path_factory.mktemp("experts"))
    async with running(gpu_fleet(path, enable_return_routed_experts=True)) as client:
        yield client, load_tiny(path)


@pytest.mark.shows("return_routed_experts")
async def test_routed_experts_are_those_of_each_place(
    served: tuple[RolloutClient, Any],
) -> None:
    client, model = served
    prompts = [[3 + (5 * row + i) % 500 for i in range(4 + 9 * row)] for row in range(N_REQUESTS)]

    rollouts = await asyncio.gather(
        *(client.generate(each, SAMPLING, want=WANT, deadline_s=DEADLINE_S) for each in prompts)
    )

    shares: list[float] = []
    errors: list[float] = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        told = rollout.arrays["routed_experts"]
        assert told.dtype == np.int32
        assert told.shape == (len(prompt) + len(rollout.tokens) - 1, N_LAYERS, N_CHOSEN)
        errors.append(error_of(model, prompt, rollout))
        shares.append(share_of_same(told, experts_of(model, prompt, rollout)))
    print("places with the same experts", min(shares), sum(shares) / N_REQUESTS)
    print("errors of the logprobs", max(errors), sum(errors) / N_REQUESTS)
    # An expert that bfloat16 changes moves one rollout by more than it moves their mean.
    assert max(errors) < FAR
    assert sum(errors) / N_REQUESTS < NEAR
    assert sum(shares) / N_REQUESTS > SAME


async def test_a_cached_prompt_tells_its_experts_again(served: tuple[RolloutClient, Any]) -> None:
    client, model = served
    prompt = [3 + i % 500 for i in range(200)]
    for _ in range(2):
        rollout = await client.generate(prompt, SAMPLING, want=WANT, deadline_s=DEADLINE_S)
        told = rollout.arrays["routed_experts"]
        assert told.shape == (len(prompt) + len(rollout.tokens) - 1, N_LAYERS, N_CHOSEN)
        assert share_of_same(told, experts_of(model, prompt, rollout)) > SAME


async def test_nobody_is_told_who_did_not_ask(served: tuple[RolloutClient, Any]) -> None:
    client, _ = served
    rollout = await client.generate([5, 6, 7], SAMPLING, deadline_s=DEADLINE_S)
    assert "routed_experts" not in rollout.arrays
