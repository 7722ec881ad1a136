"""A run on the bus is the run that it would be with generation in the trainer's own process."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import rolloutbus
from rolloutbus import Rollout, SamplingParams, SyncWeightPublisher, connect_sync
from rolloutbus.engine_worker.engines.transformers.sampler import uniforms
from rolloutbus.examples.plain_grpo import GROUP_SIZE, train
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

N_STEPS = 6
SAME = 1e-5


@torch.no_grad()
def sampled_here(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], how: SamplingParams
) -> list[list[Rollout]]:
    """What a trainer without a bus does: forward passes over whole sequences, nothing cached."""
    tokens = torch.tensor([prompt for prompt in prompts for _ in range(GROUP_SIZE)])
    n_rows, n_prompt = tokens.shape
    assert how.sampling_seed is not None
    seeds = np.arange(how.sampling_seed, how.sampling_seed + n_rows, dtype=np.uint64)
    logprobs: list[torch.Tensor] = []
    for index in range(how.max_new_tokens):
        row = model(input_ids=tokens).logits[:, -1].log_softmax(-1)
        cumulative = row.double().exp().cumsum(-1)
        u = torch.from_numpy(uniforms(seeds, np.full(n_rows, index)))[:, None]
        chosen = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
        tokens = torch.cat([tokens, chosen], dim=1)
        logprobs.append(row.gather(-1, chosen))
    told = torch.cat(logprobs, dim=1).numpy()
    answers = tokens[:, n_prompt:].numpy().astype(np.int32)
    rows = [
        Rollout(
            *("", answer, likelihoods, likelihoods, [(0, len(answer))], "length"),
            *("", n_prompt, 1, 0, 0.0, 0.0),
        )
        for answer, likelihoods in zip(answers, told, strict=True)
    ]
    return [rows[start : start + GROUP_SIZE] for start in range(0, n_rows, GROUP_SIZE)]


async def test_losses_rewards_and_weights_are_those_of_a_run_without_a_bus(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path, seed=3)
    here = load_tiny_model(tmp_path)
    expected = list(train(here, partial(sampled_here, here), lambda _: None, N_STEPS))
    there = load_tiny_model(tmp_path)
    async with rolloutbus.up(model=tmp_path, workers=2, engine_options={"threads": 1}) as fleet:
        found = await asyncio.to_thread(train_there, fleet.address, there)

    np.testing.assert_allclose(
        [loss for loss, _ in found], [loss for loss, _ in expected], rtol=0, atol=SAME
    )
    assert [reward for _, reward in found] == [reward for _, reward in expected]
    assert any(abs(loss) > 1e-3 for loss, _ in expected), "nothing was learnt"
    for name, tensor in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name], tensor, rtol=0, atol=SAME)


def train_there(address: str, model: LlamaForCausalLM) -> list[tuple[float, float]]:
    with connect_sync(address) as client:
        publisher = SyncWeightPublisher(client)

        def sample(prompts: Sequence[Sequence[int]], how: SamplingParams) -> list[list[Rollout]]:
            return client.generate_batch(prompts, how, n=GROUP_SIZE, versions="latest")

        return list(train(model, sample, publisher.publish, N_STEPS))
