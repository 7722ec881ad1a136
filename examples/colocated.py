"""Trainer and engine share one GPU: the engine sleeps while the trainer works, and the reverse.

Run it with `python -m rolloutbus.examples.colocated`. Order matters: the weights wake up first and
are replaced while no KV cache takes room beside them; only then the cache comes back.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import LlamaForCausalLM

import rolloutbus
from rolloutbus import Rollout, SamplingParams
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

Train = Callable[[LlamaForCausalLM, Sequence[Rollout]], None]
PROMPT = [1, 2, 3, 4]
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)


async def run(directory: Path, train: Train, n_steps: int) -> list[list[Rollout]]:
    """Alternate between sampling and `train`, which changes the model in place.

    Returns the rollouts of each round, one round more than steps.
    """
    model = load_tiny_model(directory)
    async with (
        rolloutbus.up(model=directory, workers=1, engine_options={"threads": 1}) as fleet,
        rolloutbus.connect(fleet.address, name="colocated") as client,
    ):
        publisher = rolloutbus.WeightPublisher(client)
        rounds = [(await client.generate_batch([PROMPT], SAMPLING, n=4, versions="latest"))[0]]
        for _ in range(n_steps):
            await client.sleep(["weights", "kv_cache"])
            train(model, rounds[-1])  # all of the memory is the trainer's
            await client.wake_up(["weights"])
            await publisher.publish(model, require="all")
            await client.wake_up(["kv_cache"])
            rounds.append(
                (await client.generate_batch([PROMPT], SAMPLING, n=4, versions="latest"))[0]
            )
    return rounds


def nudge(model: LlamaForCausalLM, rollouts: Sequence[Rollout]) -> None:
    """Stands in for a training step."""
    print([rollout.tokens.tolist() for rollout in rollouts], rollouts[0].token_versions[0])
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        build_tiny_model(Path(name), seed=0)
        asyncio.run(run(Path(name), nudge, n_steps=3))
