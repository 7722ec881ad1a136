"""A trainer in a process of its own: a version is written, and then it is killed in its copy."""

import asyncio
import sys
import threading
from collections.abc import Generator, Sequence

import torch

import rolloutbus
from rolloutbus import WeightPublisher
from rolloutbus.trainer_adapter.publisher.tensor_source import HeldTensors

WEIGHTS = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
"""What the fake engine takes."""


class EndlessTensors(HeldTensors):
    """Their copy begins and never ends."""

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        threading.Event().wait()
        yield from super().buckets()


async def main() -> None:
    async with rolloutbus.connect(sys.argv[1], name="doomed-trainer") as client:
        handle = WeightPublisher(client).start(EndlessTensors(WEIGHTS))
        async for progress in handle.changes():
            if progress.version:
                print(progress.version, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
