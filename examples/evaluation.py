"""Evaluation while training: a second client asks beside the trainer's, and takes nothing from it.

Run it with `python -m rolloutbus.examples.evaluation`. Each measurement is of one version, on words
that are never trained on. Its requests go after the trainer's wherever one waits. An update waits
for those that a worker has begun; the others are refused then, and the version is left out. It
takes about a minute on two cores.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.errors import StaleVersion
from rolloutbus.examples import plain_grpo
from rolloutbus.examples.task import WORD_LETTERS, draw_words, prompt_tokens, reward
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

LIKELIEST = SamplingParams(max_new_tokens=WORD_LETTERS, ignore_eos=True, temperature=0.0)
BELOW = -10
"""Priority of evaluation; the trainer's is 0."""
N_HELD_OUT = 32


async def evaluate(client: RolloutClient, words: Sequence[str], versions: str) -> float:
    """Mean reward of the likeliest answers.

    With `exact:V` they all are of one version. `max-staleness:K` is never too late instead: where
    an update comes between, `token_versions` of each rollout tells the versions.

    Raises:
        StaleVersion: the fleet has gone on from V.
    """
    prompts = [prompt_tokens(word) for word in words]
    groups = await client.generate_batch(prompts, LIKELIEST, versions=versions, priority=BELOW)
    pairs = zip(words, groups, strict=True)
    return float(np.mean([reward(word, group[0].tokens) for word, group in pairs]))


async def watch(client: RolloutClient, words: Sequence[str]) -> AsyncGenerator[tuple[int, float]]:
    """Yield (version, mean reward) of each version that lasts long enough; without end."""
    version = -1
    while True:
        # Waits at the router until there is a newer version, and tells which.
        first = await client.generate(
            prompt_tokens(words[0]), LIKELIEST, versions=f"min:{version + 1}", priority=BELOW
        )
        version = int(first.token_versions.max())
        try:
            yield version, await evaluate(client, words, f"exact:{version}")
        except StaleVersion:
            print(f"version {version} went by")


async def follow(client: RolloutClient, words: Sequence[str]) -> None:
    """Print what `watch` sees."""
    async for version, mean in watch(client, words):
        print(f"version {version:3d}  held-out reward {mean:.3f}")


async def main(n_steps: int = 40) -> None:
    """Bring a fleet up, train with it, and evaluate meanwhile."""
    torch.set_num_threads(1)  # the engines want the other cores
    words = draw_words(Random(1), N_HELD_OUT)  # 16 ** 24 there are: none is drawn again
    with tempfile.TemporaryDirectory() as name:
        build_tiny_model(Path(name), seed=0)
        model = load_tiny_model(Path(name))
        async with (
            rolloutbus.up(model=name, workers=2, engine_options={"threads": 1}) as fleet,
            rolloutbus.connect(fleet.address, name="evaluator") as client,
        ):
            async with asyncio.TaskGroup() as tasks:
                beside = tasks.create_task(follow(client, words))
                await asyncio.to_thread(plain_grpo.run, fleet.address, model, n_steps)
                beside.cancel()
            print(f"in the end: {await evaluate(client, words, 'latest'):.3f}")


if __name__ == "__main__":
    asyncio.run(main())
