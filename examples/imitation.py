"""A new model learns from what others sampled, by imitating what was rewarded.

`examples.offline` gives it a recording. Clipped ratios would not do, since what it does itself is
soon far from what was recorded.
"""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from rolloutbus.examples.grpo import Learner, LearnerOptions
from rolloutbus.examples.rollouts import Group
from rolloutbus.examples.task import WORD_LETTERS, draw_words, prompt_tokens, reward, token_rewards
from rolloutbus.examples.training import make_batch

HELD_OUT_WORDS = 100
"""As the demo draws them: words that no rollout of it was about."""


def imitate(logprobs: Tensor, _: Tensor, rewards: Tensor) -> Tensor:
    """Make rewarded tokens likelier; float32 [n, n_tokens] each -> float32 scalar."""
    return -(logprobs * rewards).sum() / rewards.sum().clamp(min=1.0)


def train(steps: Iterable[list[Group]], model: LlamaForCausalLM, n_steps: int) -> Iterator[float]:
    """Train on the groups of each step; yields the mean reward of their rollouts."""
    learner = Learner(model, LearnerOptions(steps=n_steps), imitate)
    for some in steps:
        earned = [token_rewards(each.word, row.tokens) for each in some for row in each.rollouts]
        rewards = torch.from_numpy(np.stack(earned))
        learner.step(replace(make_batch(some)[0], advantages=rewards))
        yield rewards.mean().item()


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, seed: int) -> float:
    """Mean reward of the likeliest answers to words that were never trained on."""
    words = draw_words(Random(seed), HELD_OUT_WORDS)
    tokens = torch.tensor([prompt_tokens(word) for word in words])
    n_prompt = tokens.shape[1]
    for _ in range(WORD_LETTERS):
        likeliest = model(input_ids=tokens).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, likeliest], dim=1)
    answers = tokens[:, n_prompt:].numpy().astype(np.int32)
    return float(np.mean([reward(*pair) for pair in zip(words, answers, strict=True)]))
