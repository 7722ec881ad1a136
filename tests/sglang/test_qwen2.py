"""A second architecture, with tied embeddings, and a context that is used up to its last token."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.errors import Refused, RequestError
from rolloutbus.launcher.settings import UpOptions
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4
MAX_CONTEXT = 256
USABLE = MAX_CONTEXT - 6
"""SGLang keeps some for itself."""
AT_ONCE = 16
"""Tokens of prompts that the engine computes in a step, unless one alone has more."""
PROMPTS = [[3 + i, 10, 20 + i, 7, 100 + i] for i in range(8)]
GREEDY = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)


def described(model: Path) -> UpOptions:
    options = fleet_of(model, max_prefill_tokens=AT_ONCE)
    assert "engine_options" in options
    engine = {**options["engine_options"], "max_context": MAX_CONTEXT}
    return {**options, "engine_options": engine}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(qwen2: Path) -> AsyncIterator[RolloutClient]:
    async with (
        rolloutbus.up(**described(qwen2)) as fleet,
        rolloutbus.connect(fleet.address) as connected,
    ):
        yield connected


@pytest.mark.shows("max_num_batched_tokens")
async def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward_pass(
    client: RolloutClient, qwen2: Path
) -> None:
    reference = Reference(qwen2)
    assert sum(map(len, PROMPTS)) > AT_ONCE

    rollouts = await client.generate_batch(PROMPTS, GREEDY, deadline_s=DEADLINE_S)

    for prompt, [rollout] in zip(PROMPTS, rollouts, strict=True):
        assert rollout.tokens.tolist() == reference.likeliest(prompt, rollout)
        truth = reference.fresh(prompt, rollout, 1.0)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE


@pytest.mark.shows("context_length", "max_model_len", "prompts beyond the context")
@pytest.mark.parametrize("n_prompt", [1, 100, USABLE - 1])
async def test_prompt_and_output_may_fill_the_context_and_not_more(
    client: RolloutClient, n_prompt: int
) -> None:
    prompt = [3 + i % 500 for i in range(n_prompt)]
    room = USABLE - n_prompt
    full = SamplingParams(max_new_tokens=room, ignore_eos=True)

    rollout = await client.generate(prompt, full, deadline_s=DEADLINE_S)

    assert len(rollout.tokens) == room
    assert rollout.finish_reason == "length"
    too_much = SamplingParams(max_new_tokens=room + 1, ignore_eos=True)
    with pytest.raises(Refused, match=f"context of {USABLE} tokens"):
        await client.generate(prompt, too_much, deadline_s=DEADLINE_S)


@pytest.mark.shows("enable_memory_saver")
@pytest.mark.parametrize("kind", ["sleep", "wake_up"])
async def test_memory_that_would_not_be_freed_is_not_given_up(
    client: RolloutClient, kind: str
) -> None:
    told = (await getattr(client, kind)(["kv_cache"], check=False)).by_worker["w0"]

    assert isinstance(told, RequestError)
    assert told.code == "unsupported"
    assert "enable_memory_saver" in str(told)
