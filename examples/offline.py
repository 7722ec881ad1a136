"""Train the demo's model from a recording of the demo: no router, no engines, no waiting.

    rolloutbus demo --record journal
    rolloutbus export journal -o trajectories.parquet
    python -m rolloutbus.examples.offline trajectories.parquet

A model that starts anew learns from what others sampled, by imitating what was rewarded: clipped
ratios would not do, since what it does itself is soon far from what was recorded.
"""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from rolloutbus import OfflineRollouts
from rolloutbus.examples.grpo import Learner, LearnerOptions
from rolloutbus.examples.rollouts import Group
from rolloutbus.examples.task import WORD_LETTERS, draw_words, prompt_tokens, reward, token_rewards
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.examples.training import make_batch
from rolloutbus.types import OfflineRollout

GROUPS_PER_STEP = 8
GROUP_SIZE = 8
HELD_OUT_WORDS = 100
"""As the demo draws them: words that no rollout of it was about."""
SHOW_EVERY = 10


def imitate(logprobs: Tensor, _: Tensor, rewards: Tensor) -> Tensor:
    """Make rewarded tokens likelier; float32 [n, n_tokens] each -> float32 scalar."""
    return -(logprobs * rewards).sum() / rewards.sum().clamp(min=1.0)


def train(source: OfflineRollouts, model: LlamaForCausalLM, n_steps: int) -> Iterator[float]:
    """Train on groups as they ended, some at a time; yields the mean reward of their rollouts."""
    learner = Learner(model, LearnerOptions(steps=n_steps), imitate)
    groups = map(_group, source.groups(GROUP_SIZE))
    while len(some := list(islice(groups, GROUPS_PER_STEP))) == GROUPS_PER_STEP:
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


def _group(rows: list[OfflineRollout]) -> Group:
    return Group(rows[0].group, [each.rollout for each in rows])  # the demo names groups by word


def main() -> None:
    """Train, and say what came of it."""
    parser = argparse.ArgumentParser(description="Train a new model from a recording of the demo.")
    parser.add_argument("source", help="a journal's directory, or an export (.parquet, .jsonl)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of that run of the demo")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, seed = OfflineRollouts(options.source), options.seed
    n_steps = sum(1 for _ in source.groups(GROUP_SIZE)) // GROUPS_PER_STEP
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(Path(folder), seed)
        model = load_tiny_model(Path(folder))
    print(f"held-out reward before: {evaluate(model, seed):.3f}")
    for number, rewards in enumerate(train(source, model, n_steps), 1):
        if number % SHOW_EVERY == 0:
            print(f"step {number:4d} of {n_steps}  reward of its rollouts {rewards:.2f}")
    print(f"held-out reward after:  {evaluate(model, seed):.3f}")


if __name__ == "__main__":
    main()
