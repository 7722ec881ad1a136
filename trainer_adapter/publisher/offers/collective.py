"""`collective`: the trainer broadcasts the weights to all workers of an update at once.

Spec: docs/protocol.md, "Collective".
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from rolloutbus.bus.actor.daemon_thread import in_daemon_thread
from rolloutbus.bus.host import host_id
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.weights.rank_group import BrokenGroup, RankGroup, Seat, first_line
from rolloutbus.bus.weights.rendezvous import BadReport, why_not
from rolloutbus.bus.wire.messages.weights import Bucket, Offer, Tensor
from rolloutbus.trainer_adapter.publisher.offers.buckets import checksum_of, fill, spans_of
from rolloutbus.trainer_adapter.publisher.offers.devices import QueuedWork, gpu_uuid, only_gpu
from rolloutbus.trainer_adapter.publisher.offers.rendezvous import Rendezvous

BUCKET_BYTES = 256 << 20
_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


@strict()
class CollectiveOffering:
    """See `Offering`. Holds a second copy of the weights, from version to version.

    A group is made for each version, of the workers that the router chose, and never used again.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"] = "gloo",
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Choose how and where.

        Args:
            backend: `gloo` through host memory; `nccl` from GPU to GPU, for tensors on one GPU
                that no worker uses.
            host: address of this host that workers meet at. Neither gloo nor nccl asks who is
                there or hides what it sends: another one than loopback only on a network where
                everybody may read the weights.
            timeout_s: for all to come, and then for all to have it.
            bucket_bytes: size of the pieces.
        """
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._pieces: list[torch.Tensor] = []
        self._device = _CPU
        self._rendezvous: Rendezvous | None = None
        self.problem = ""
        """Why the last version did not go out this way to all; empty if it did."""

    async def prepare(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Offer]:
        """See `Offering`."""
        await self.close()
        device = _CPU if self._backend == "gloo" else only_gpu(tensors)
        if device is None:
            return []
        self._device, self.problem = device, "no worker has asked for it"
        queued = QueuedWork(tensors)
        buckets = await asyncio.to_thread(self._copy, layout, tensors, queued)
        try:
            self._rendezvous = Rendezvous(self._host, self._timeout_s)
        except (OSError, RuntimeError) as error:
            self.problem = f"no rendezvous at {self._host}: {first_line(error)}"
            _log.warning("%s", self.problem)
            return []
        is_local = self._host in {"127.0.0.1", "::1"}
        return [
            Offer(
                "collective",
                at=f"{self._host}:{self._rendezvous.port}",
                host=host_id() if is_local else "",
                backend=self._backend,
                buckets=buckets,
            )
        ]

    async def serve(self) -> None:
        """Wait for the workers, send, and wait until all have it."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            return
        try:
            self.problem = await self._send(rendezvous)
        except (BadReport, BrokenGroup, RuntimeError) as error:
            self.problem = first_line(error)
        finally:
            rendezvous.end()
        if self.problem:
            _log.warning("collective transfer failed: %s", self.problem)

    def call_off(self) -> None:
        """Ranks that wait for others take another way at once."""
        if self._rendezvous is not None:
            self._rendezvous.call_off()

    async def close(self) -> None:
        """The rendezvous ends; who still waits there takes another way."""
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.end()

    def forget(self) -> None:
        """Free the copy."""
        self._pieces = []

    async def _send(self, rendezvous: Rendezvous) -> str:
        """Why not all have it; empty if they have."""
        world = await rendezvous.world()
        gpu = gpu_uuid(self._device) if self._device.type == "cuda" else ""
        reports = await rendezvous.joined(world)
        problem = why_not(gpu, reports)
        rendezvous.go(problem)
        if problem:
            await rendezvous.heard(reports)
            return problem
        seat = Seat(self._backend, 0, world, self._host, self._timeout_s)
        pieces = self._pieces

        def broadcast() -> RankGroup:
            group = RankGroup(dist, rendezvous.client(), seat)
            try:
                group.broadcast(pieces)
            except BaseException:
                group.close()
                raise
            return group

        try:
            group = await in_daemon_thread(broadcast, "rolloutbus-broadcast")
        except BaseException:
            self._pieces = []  # the thread may read them still: the next version gets others
            raise
        try:
            return why_not("", await rendezvous.done(world))
        finally:
            group.close()

    def _copy(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor], queued: QueuedWork
    ) -> list[Bucket]:
        queued.wait()
        spans = list(spans_of(layout, self._bucket_bytes))
        sizes, device = [each.size_bytes for each in spans], self._device
        if [(n, device) for n in sizes] != [(len(each), each.device) for each in self._pieces]:
            self._pieces = []
            self._pieces = [torch.zeros(n, dtype=torch.uint8, device=device) for n in sizes]
        buckets: list[Bucket] = []
        for span, piece in zip(spans, self._pieces, strict=True):
            fill(piece, span, layout, tensors)
            buckets.append(Bucket(span.start, span.size_bytes, checksum_of(piece)))
        return buckets
