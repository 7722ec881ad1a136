"""The run of `plain_grpo` on a fleet, and with generation in the trainer's own process."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from transformers import LlamaForCausalLM

from rolloutbus import Rollout, SamplingParams, SyncWeightPublisher, connect_sync
from rolloutbus.engine_worker.engines.transformers.sampler import uniforms
from rolloutbus.examples.plain_grpo import GROUP_SIZE, train

Step = tuple[float, float]
"""Loss and mean reward."""


def train_here(model: LlamaForCausalLM, n_steps: int) -> list[Step]:
    """Train in place, without a bus."""
    return list(train(model, partial(_sampled, model), lambda _: None, n_steps))


def train_there(address: str, model: LlamaForCausalLM, n_steps: int) -> list[Step]:
    """Train in place, with the fleet at this address."""
    with connect_sync(address) as client:
        publisher = SyncWeightPublisher(client)

        def sample(prompts: Sequence[Sequence[int]], how: SamplingParams) -> list[list[Rollout]]:
            return client.generate_batch(prompts, how, n=GROUP_SIZE, versions="latest")

        return list(train(model, sample, publisher.publish, n_steps))


@torch.no_grad()
def _sampled(
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
