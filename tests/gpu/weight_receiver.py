"""A worker's way to weights on a GPU, in a process of its own: a line of JSON in, one out, each.

python -m tests.gpu.weight_receiver cuda_ipc|collective GPU_UUID
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import digest_of
from rolloutbus.bus.weights.rank_group import KeptGroup
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.raw_tensor import HandleBook
from rolloutbus.engine_worker.weights.staged import CannotFetch, Fetcher, Staged
from rolloutbus.engine_worker.weights.transports.broadcast import GpuBuffer, WorkerRendezvous
from rolloutbus.engine_worker.weights.transports.buckets import offer_of
from rolloutbus.engine_worker.weights.transports.collective import Collective
from rolloutbus.engine_worker.weights.transports.cuda_ipc import CudaIpc
from rolloutbus.engine_worker.weights.transports.gpu_memory import SpareGpuMemory


class HalfRendezvous(WorkerRendezvous):
    """Receives one bucket, says so, and is not heard of again."""

    def receive(self, pieces: Sequence[torch.Tensor]) -> None:
        super().receive(pieces[:1])
        say(half=True)
        os.kill(os.getpid(), signal.SIGSTOP)


class WeightReceiver:
    """Receives versions of weights as ordered on standard input."""

    def __init__(self, transport: str, gpu: str) -> None:
        self._gpu = gpu
        memory = SpareGpuMemory(gpu, HandleBook())
        self._way: Fetcher = (
            CudaIpc(memory) if transport == "cuda_ipc" else Collective(SpareBuffer(), memory)
        )
        self._staged: Staged | None = None

    def obey(self, order: dict[str, Any]) -> None:
        """One order, one answer."""
        match order["do"]:
            case "take":
                say(**asyncio.run(self._take(order)))
            case "look":
                say(digests=self._digests())
            case "where":
                say(places=[each.data_ptr() for each in self._tensors().values()])
            case "release":
                assert self._staged is not None
                self._staged.release()
                self._staged = None
                say(released=True)
            case "half":
                self._half(order)
            case other:
                raise ValueError(other)

    async def _take(self, order: dict[str, Any]) -> dict[str, Any]:
        manifest = msgspec.json.decode(order["manifest"], type=Manifest)
        rank, world = order.get("rank", 0), order.get("world", 0)
        ask = PrepareUpdate("default", manifest.version, "", rank=rank, world=world)
        try:
            self._staged = await self._way.fetch(ask, manifest, cast("BulkLink", None))
        except (CannotFetch, EngineFailed) as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"digests": self._digests(), "moved_bytes": self._staged.moved_bytes}

    def _digests(self) -> dict[str, int]:
        return {name: digest_of(each.cpu().numpy()) for name, each in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        assert self._staged is not None
        tensors = cast("dict[str, torch.Tensor]", self._staged.tensors)
        assert all(each.is_cuda for each in tensors.values())
        return tensors

    def _half(self, order: dict[str, Any]) -> None:
        manifest = msgspec.json.decode(order["manifest"], type=Manifest)
        offer = offer_of(manifest, "collective")
        meeting = HalfRendezvous(
            offer.at, offer.backend, (order["rank"], order["world"]), KeptGroup()
        )
        landing = GpuBuffer(SpareGpuMemory(self._gpu, HandleBook()), offer.buckets)
        meeting.join(gpu=self._gpu)
        meeting.receive(landing.pieces)


def say(**report: object) -> None:
    print(json.dumps(report), flush=True)


def main() -> None:
    receiver = WeightReceiver(sys.argv[1], sys.argv[2])
    say(ready=True)
    for line in sys.stdin:
        receiver.obey(json.loads(line))


if __name__ == "__main__":
    main()
