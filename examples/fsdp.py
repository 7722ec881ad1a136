"""The run of `plain_grpo` on two ranks that hold the model together (FSDP2).

`python -m rolloutbus.examples.fsdp` starts both. Each samples its share of the rollouts and trains
on it. A publication takes all ranks: rank 0 sends what the others gather with it, and tells them
the number of the version. It takes some two minutes on two cores.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import rolloutbus
from rolloutbus import SamplingParams, ShardedSource, SyncRolloutClient, SyncWeightPublisher
from rolloutbus.examples.grpo import Learner, LearnerOptions
from rolloutbus.examples.plain_grpo import GROUP_SIZE, N_EPOCHS, WORDS_PER_STEP
from rolloutbus.examples.rollouts import Group
from rolloutbus.examples.task import WORD_LETTERS, draw_words, prompt_tokens
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.examples.training import make_batch

N_RANKS = 2
N_WORDS = WORDS_PER_STEP // N_RANKS
"""Of a rank, at each step."""


def publish(client: SyncRolloutClient, shards: ShardedSource) -> int:
    """Bring the weights to the fleet; returns their version, on each rank."""
    version = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        version[0] = SyncWeightPublisher(client).publish(shards, require="all").version
    else:
        shards.assist()  # until all is copied: the fleet need not have it yet
    dist.broadcast(version, src=0)
    return int(version)


def train(client: SyncRolloutClient, directory: Path, n_steps: int) -> Iterator[float]:
    """Train; yields the mean reward of this rank's rollouts at each step.

    Both ranks draw what one alone would draw if it had all rollouts, so they train as that one.
    """
    rank, rng = dist.get_rank(), Random(0)
    model = load_tiny_model(directory)
    fully_shard(model, mesh=init_device_mesh("cpu", (N_RANKS,)))
    learner = Learner(model, LearnerOptions(steps=n_steps * N_EPOCHS))
    shards = ShardedSource(model)
    version = 0
    for step in range(n_steps):
        words = draw_words(rng, WORDS_PER_STEP)[rank * N_WORDS :][:N_WORDS]
        row = (step * N_RANKS + rank) * N_WORDS * GROUP_SIZE
        groups = client.generate_batch(
            [prompt_tokens(word) for word in words],
            SamplingParams(max_new_tokens=WORD_LETTERS, ignore_eos=True, sampling_seed=row),
            n=GROUP_SIZE,
            versions=f"min:{version}",
        )
        batch, reward = make_batch([Group(*pair) for pair in zip(words, groups, strict=True)])
        for _ in range(N_EPOCHS):
            learner.step(batch)
        version = publish(client, shards)
        yield reward


def run_rank(rank: int, address: str, directory: Path, n_steps: int) -> None:
    """What the process of one rank does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=N_RANKS
    )
    with rolloutbus.connect_sync(address, name=f"rank-{rank}") as client:
        for step, reward in enumerate(train(client, directory, n_steps), 1):
            line = f"rank {rank}  step {step:3d}  reward {reward:.3f}\n"
            print(line, end="", flush=True)  # in one write: the ranks share the output
    dist.destroy_process_group()


async def main(n_steps: int = 20) -> None:
    """Bring a fleet up and train with it."""
    with tempfile.TemporaryDirectory() as name:
        build_tiny_model(Path(name), seed=0)
        async with rolloutbus.up(model=name, workers=2, engine_options={"threads": 1}) as fleet:
            arguments = (fleet.address, Path(name), n_steps)
            await asyncio.to_thread(spawn, run_rank, arguments, nprocs=N_RANKS)


if __name__ == "__main__":
    asyncio.run(main())
