"""The real SGLang with a configuration alone: a trainer brings the first weights."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams, Want, WeightPublisher
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def bare(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the Qwen2 without its weights."""
    path = tmp_path_factory.mktemp("bare")
    for each in qwen2.iterdir():
        if each.suffix != ".safetensors":
            shutil.copy(each, path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(bare: Path) -> AsyncIterator[RolloutClient]:
    async with (
        rolloutbus.up(**fleet_of(bare, load_format="dummy", disable_radix_cache=True)) as fleet,
        rolloutbus.connect(fleet.address) as connected,
    ):
        yield connected


@pytest.mark.shows("load_format: dummy", "load_weights_from_disk")
async def test_a_trainer_brings_the_first_weights(client: RolloutClient, qwen2: Path) -> None:
    reference = Reference(qwen2)
    with torch.no_grad():  # SGLang makes up numbers also for what a trainer begins with as zeros
        reference.model.get_parameter("model.layers.0.self_attn.q_proj.bias").zero_()
    publisher = WeightPublisher(client)
    published = await publisher.publish(reference.model, require="all", deadline_s=DEADLINE_S)
    reference.keep(published.version)
    assert (await client.check_weights()).is_ok
    rollout = await client.generate(PROMPT, GREEDY, versions="latest", deadline_s=DEADLINE_S)
    assert rollout.tokens.tolist() == reference.likeliest(PROMPT, rollout)
    want = reference.fresh(PROMPT, rollout, 1.0)
    np.testing.assert_allclose(rollout.logprobs, want, atol=1e-4)
    back = await publisher.publish(qwen2, require="all", deadline_s=DEADLINE_S)
    reference = Reference(qwen2)
    reference.keep(back.version)
    rollout = await client.generate(PROMPT, GREEDY, versions="latest", deadline_s=DEADLINE_S)
    assert rollout.tokens.tolist() == reference.likeliest(PROMPT, rollout)


@pytest.mark.shows("disable_radix_cache")
async def test_without_a_prefix_cache_a_prompt_is_computed_again(client: RolloutClient) -> None:
    want = Want(cached_tokens=True)
    for _ in range(2):
        rollout = await client.generate([*range(64)], GREEDY, want=want, deadline_s=DEADLINE_S)
        assert rollout.arrays["cached_tokens"].tolist() == [0]
