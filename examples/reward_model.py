"""GRPO with a reward model: a fleet of its own reads each answer, and says how good it is.

`python -m rolloutbus.examples.reward_model`: raters like vowels. A judge learns that from their
ratings, and the policy from the judge, which reads each group while others are still sampled.
"""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import rolloutbus
from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.examples.grpo import Batch, Learner, LearnerOptions, group_advantages
from rolloutbus.examples.task import VOCABULARY
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

PROMPTS = [[VOCABULARY.index(text) for text in ("<s>", letter, "=")] for letter in "abcdefgh"]
VOWELS = torch.tensor([text in "aeio" for text in VOCABULARY])
GOOD, BAD = (VOCABULARY.index(text) for text in ("=", "<pad>"))  # what the judge says
N_TOKENS, GROUP_SIZE = 12, 8
SAMPLING = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True)


def train_judge(directory: Path, n_steps: int = 150) -> None:
    """Write a model that says GOOD after an answer as often as raters like such an answer."""
    build_tiny_model(directory, seed=1)
    judge = load_tiny_model(directory)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.tensor(PROMPTS).repeat(8, 1)
    for _ in range(n_steps):
        likings = torch.rand(len(prompts), 1, generator=draw)
        weights = torch.where(VOWELS, likings / VOWELS.sum(), (1 - likings) / (~VOWELS).sum())
        answers = torch.multinomial(weights, N_TOKENS, replacement=True, generator=draw)
        ratings = torch.bernoulli(VOWELS[answers].float().mean(1), generator=draw)
        logits = judge(input_ids=torch.cat([prompts, answers], dim=1)).logits[:, -1]
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(logits[:, GOOD] - logits[:, BAD], ratings).backward()
        optimizer.step()
    judge.save_pretrained(directory)


async def scored(
    policy: RolloutClient, judge: RolloutClient, prompt: list[int]
) -> tuple[list[Rollout], Tensor]:
    """Sample a group, and have it read; with it its rewards, float32 [GROUP_SIZE]."""
    [group] = await policy.generate_batch([prompt], SAMPLING, n=GROUP_SIZE, versions="latest")
    read = await judge.score(prompt, [each.tokens for each in group], [GOOD, BAD], deadline_s=60)
    return group, torch.tensor(read.scores[:, 0])


async def train(
    policy: RolloutClient, judge: RolloutClient, learner: Learner, n_steps: int
) -> list[float]:
    """Train in place; returns the mean reward of each step."""
    publisher = rolloutbus.WeightPublisher(policy)
    curve: list[float] = []
    for step in range(1, n_steps + 1):
        groups = await asyncio.gather(*(scored(policy, judge, prompt) for prompt in PROMPTS))
        rows = [rollout for group, _ in groups for rollout in group]
        rewards = torch.stack([each for _, each in groups])
        batch = Batch(
            prompts=torch.tensor(PROMPTS).repeat_interleave(GROUP_SIZE, dim=0),
            tokens=torch.from_numpy(np.stack([row.tokens for row in rows])).long(),
            logprobs=torch.from_numpy(np.stack([row.logprobs for row in rows])),
            advantages=group_advantages(rewards[..., None]).flatten(0, 1).expand(-1, N_TOKENS),
        )
        await asyncio.to_thread(learner.step, batch)
        await publisher.publish(learner.model, require="all")
        curve.append(rewards.mean().item())
        print(f"step {step:3d}  reward {curve[-1]:.3f}")
    return curve


async def main(n_steps: int = 20) -> None:
    """Train a judge, bring both fleets up, and train the policy."""
    torch.set_num_threads(1)  # the engines want the other cores
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as judges:
        build_tiny_model(Path(own), seed=0)
        train_judge(Path(judges))
        async with (
            rolloutbus.up(model=own, engine_options={"threads": 1}) as fleet,
            rolloutbus.up(model=judges, workers=1, store=False) as readers,
            rolloutbus.connect(fleet.address) as policy,
            rolloutbus.connect(readers.address) as judge,
        ):
            learner = Learner(load_tiny_model(Path(own)), LearnerOptions(steps=n_steps))
            await train(policy, judge, learner, n_steps)


if __name__ == "__main__":
    asyncio.run(main())
