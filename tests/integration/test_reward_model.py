"""A reward model on a fleet of its own: scores are those of the judge; the policy learns them."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import rolloutbus
from rolloutbus import Rollout, RolloutClient
from rolloutbus.examples.grpo import Learner, LearnerOptions
from rolloutbus.examples.reward_model import (
    BAD,
    GOOD,
    GROUP_SIZE,
    PROMPTS,
    VOWELS,
    scored,
    train,
    train_judge,
)
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from tests.integration.live_fleet import PATIENT, START_S, STEADY_HOST

pytestmark = [pytest.mark.integration, pytest.mark.timeout(4 * START_S)]

N_STEPS = 8
GAIN = 0.2
"""Far below what a run gains: 0.42 of the reward, give or take 0.03."""
TOLERANCE = 1e-4


async def sampled(policy: RolloutClient, judge: RolloutClient) -> tuple[list[Rollout], Tensor]:
    """A group for each prompt, as one list; with it their rewards, float32 [n]."""
    groups = await asyncio.gather(*(scored(policy, judge, prompt) for prompt in PROMPTS))
    rollouts = [each for group, _ in groups for each in group]
    return rollouts, torch.cat([rewards for _, rewards in groups])


def vowels_in(rollouts: list[Rollout]) -> float:
    """Their share, which raters like and the policy is never told."""
    return VOWELS[np.stack([each.tokens for each in rollouts])].float().mean().item()


async def test_the_policy_learns_what_the_judge_reads(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    own, judges = tmp_path / "policy", tmp_path / "judge"
    build_tiny_model(own, seed=0)
    train_judge(judges)
    async with (
        rolloutbus.up(
            model=own, workers=2, engine_options={"threads": 1}, lease=PATIENT, host=STEADY_HOST
        ) as fleet,
        rolloutbus.up(
            model=judges, workers=1, store=False, lease=PATIENT, host=STEADY_HOST
        ) as readers,
        rolloutbus.connect(fleet.address) as policy,
        rolloutbus.connect(readers.address) as judge,
    ):
        before, rewards = await sampled(policy, judge)
        learner = Learner(load_tiny_model(own), LearnerOptions(steps=N_STEPS))
        curve = await train(policy, judge, learner, N_STEPS)
        after, _ = await sampled(policy, judge)

    assert {each.version_runs[0][0] for each in after} == {N_STEPS}
    assert curve[-1] > curve[0] + GAIN
    assert vowels_in(after) > vowels_in(before) + GAIN
    prompts = torch.tensor(PROMPTS).repeat_interleave(GROUP_SIZE, dim=0)
    answers = torch.from_numpy(np.stack([each.tokens for each in before]))
    with torch.no_grad():
        logits = load_tiny_model(judges)(input_ids=torch.cat([prompts, answers], dim=1)).logits
    said = logits[:, -1, [GOOD, BAD]].softmax(-1)
    torch.testing.assert_close(rewards, said[:, 0], rtol=0, atol=TOLERANCE)
