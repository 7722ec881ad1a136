"""GRPO in a plain loop: sample, reward, step, publish; one after another.

Run it with `python -m rolloutbus.examples.plain_grpo`; it takes about a minute on two cores. What a
trainer has to say to the bus are the two calls in `main`: all samples of a step come from the
weights that were published last.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import torch
from transformers import LlamaForCausalLM

import rolloutbus
from rolloutbus import Rollout, SamplingParams
from rolloutbus.examples.grpo import Learner, LearnerOptions
from rolloutbus.examples.rollouts import Group
from rolloutbus.examples.task import WORD_LETTERS, draw_words, prompt_tokens
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.examples.training import make_batch

WORDS_PER_STEP = 8
GROUP_SIZE = 8
N_EPOCHS = 2
"""Gradient steps with the samples of a step; after the first they are off-policy, hence clipped."""

Sample = Callable[[Sequence[Sequence[int]], SamplingParams], list[list[Rollout]]]
"""Prompts, and how to draw -> for each prompt its group of GROUP_SIZE rollouts."""
Publish = Callable[[LlamaForCausalLM], object]
"""Has the engines sample with these weights from now on."""


def train(
    model: LlamaForCausalLM, sample: Sample, publish: Publish, n_steps: int, seed: int = 0
) -> Iterator[tuple[float, float]]:
    """Train the model in place; yields (loss of the last epoch, mean reward) of each step.

    The same seed draws the same words, and the same tokens as long as the weights are the same.
    """
    rng = Random(seed)
    learner = Learner(model, LearnerOptions(steps=n_steps * N_EPOCHS))
    for step in range(n_steps):
        words = draw_words(rng, WORDS_PER_STEP)
        sampling = SamplingParams(
            max_new_tokens=WORD_LETTERS,
            ignore_eos=True,
            sampling_seed=step * WORDS_PER_STEP * GROUP_SIZE,  # row r is drawn with this + r
        )
        groups = sample([prompt_tokens(word) for word in words], sampling)
        batch, reward = make_batch([Group(*pair) for pair in zip(words, groups, strict=True)])
        losses = [learner.step(batch).loss for _ in range(N_EPOCHS)]
        publish(model)
        yield losses[-1], reward


def run(address: str, model: LlamaForCausalLM, n_steps: int) -> None:
    """Train with the fleet at this address, and say how it goes."""
    with rolloutbus.connect_sync(address, name="trainer") as client:
        publisher = rolloutbus.SyncWeightPublisher(client)

        def sample(prompts: Sequence[Sequence[int]], how: SamplingParams) -> list[list[Rollout]]:
            return client.generate_batch(prompts, how, n=GROUP_SIZE, versions="latest")

        def publish(trained: LlamaForCausalLM) -> None:
            publisher.publish(trained, require="all")

        for number, (loss, reward) in enumerate(train(model, sample, publish, n_steps), 1):
            print(f"step {number:3d}  loss {loss:+.4f}  reward {reward:.3f}")


async def main(n_steps: int = 40) -> None:
    """Bring a fleet up and train with it."""
    torch.set_num_threads(1)  # the engines want the other cores
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build_tiny_model(directory, seed=0)
        async with rolloutbus.up(model=directory, workers=2, engine_options={"threads": 1}) as up:
            await asyncio.to_thread(run, up.address, load_tiny_model(directory), n_steps)


if __name__ == "__main__":
    asyncio.run(main())
