"""`collective`: the trainer's broadcast is received together with the other workers.

Spec: docs/protocol.md, "Collective".
"""

from functools import partial
from typing import TYPE_CHECKING

from rolloutbus.bus.actor.loop import in_daemon_thread
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import Bytes, total_bytes
from rolloutbus.bus.weights.rank_group import KeptGroup
from rolloutbus.bus.wire.messages.weights import Manifest, Offer, PrepareUpdate
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.staged import CannotFetch, Fetcher, Staged
from rolloutbus.engine_worker.weights.transports.buckets import in_buckets, offer_of

if TYPE_CHECKING:
    from rolloutbus.engine_worker.weights.transports.gpu_memory import SpareGpuMemory


class Collective(Fetcher):
    """Receives by gloo into host memory, by nccl into memory of the engine's GPU."""

    def __init__(self, spare: SpareBuffer, gpu_memory: "SpareGpuMemory | None" = None) -> None:
        """`gpu_memory`: None for an engine that is not on one GPU, which gets nothing by nccl."""
        self._spare = spare
        self._gpu_memory = gpu_memory
        self._kept = KeptGroup()

    def close(self) -> None:
        """Let go of the other ranks, and of memory of the GPU."""
        self._kept.close()
        self.give_back_spares()

    def give_back_spares(self) -> None:
        """Give back memory of the GPU."""
        if self._gpu_memory is not None:
            self._gpu_memory.clear()

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Receive and verify; see `Fetcher`."""
        del store
        offer = offer_of(manifest, "collective")
        if not 0 < ask.rank < ask.world:
            raise CannotFetch(f"rank {ask.rank} of {ask.world}")
        is_on_gpu = offer.backend == "nccl"
        content = None if is_on_gpu else self._spare.take(total_bytes(manifest.tensors))
        call = partial(self._receive, ask, manifest, offer, content)
        return await in_daemon_thread(call, "rolloutbus-collective")

    def _receive(
        self, ask: PrepareUpdate, manifest: Manifest, offer: Offer, content: Bytes | None
    ) -> Staged:
        """`content` is None on a GPU, which has an allocator of its own."""
        # Torch takes seconds to import, and other ways do without.
        from rolloutbus.engine_worker.weights.transports.broadcast import (  # noqa: PLC0415
            GpuBuffer,
            HostBuffer,
            receive,
        )

        def place() -> HostBuffer | GpuBuffer:
            if content is None:
                if self._gpu_memory is None:
                    raise CannotFetch("nccl needs an engine on one GPU")
                return GpuBuffer(self._gpu_memory, offer.buckets)
            return HostBuffer(content, manifest, offer.buckets)

        received = receive(offer, (ask.rank, ask.world), self._kept, place)

        def release() -> None:
            if content is not None:
                self._spare.give_back(content)
            elif self._gpu_memory is not None:
                self._gpu_memory.give_back(received.pieces)

        return in_buckets(manifest, "collective", offer.buckets, received.parts, release)
