"""Where a broadcast is received, and how one knows that it arrived whole."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rolloutbus.bus.weights.manifest import Bytes, first_mismatch
from rolloutbus.bus.weights.rendezvous import RankReport
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.weights import Bucket, Manifest, Offer
from rolloutbus.engine_worker.weights.gpu import device_of, first_wrong
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.staged import CannotFetch
from rolloutbus.engine_worker.weights.transports.buckets import wrong_bucket
from rolloutbus.engine_worker.weights.transports.rendezvous import WorkerRendezvous
from rolloutbus.engine_worker.weights.verify import wrong_bytes


class ReceiveBuffer(Protocol):
    """Memory for one version, a piece per bucket."""

    @property
    def gpu(self) -> str:
        """UUID of the GPU it is on; empty: host memory."""
        ...

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """uint8 [size of the bucket] each: what is received into."""
        ...

    @property
    def parts(self) -> Sequence[RawTensor]:
        """The same memory, as an engine is given it."""
        ...

    def wrong(self) -> EngineFailed | None:
        """Why these are not the bytes that were published; None if they are."""
        ...


class HostLanding:
    """Host memory, verified by the digest of each tensor."""

    gpu = ""

    def __init__(self, content: Bytes, manifest: Manifest, buckets: Sequence[Bucket]) -> None:
        self._content = content
        self._manifest = manifest
        self.parts = [content[each.start :][: each.size_bytes] for each in buckets]
        self.pieces: list[torch.Tensor] = [torch.as_tensor(each) for each in self.parts]

    def wrong(self) -> EngineFailed | None:
        """See `ReceiveBuffer`."""
        tensor = first_mismatch(self._content, self._manifest.tensors)
        return wrong_bytes(tensor.name) if tensor is not None else None


class GpuLanding:
    """Memory of the engine's GPU, verified by the checksum of each bucket."""

    def __init__(self, gpus: Sequence[str], buckets: Sequence[Bucket]) -> None:
        """`gpus`: the engine's. Raises CannotFetch where there is no room, or not one GPU."""
        if len(gpus) != 1:
            raise CannotFetch(f"nccl needs an engine on one GPU, not on {len(gpus)}")
        self.gpu = gpus[0]
        device = device_of(self.gpu)
        try:
            self.pieces = [
                torch.empty(each.size_bytes, dtype=torch.uint8, device=device) for each in buckets
            ]
        except torch.OutOfMemoryError as error:
            raise CannotFetch("the GPU has no room for a second copy of the weights") from error
        self.parts = self.pieces
        self._buckets = buckets

    def wrong(self) -> EngineFailed | None:
        """See `ReceiveBuffer`."""
        bucket = first_wrong(self.pieces, self._buckets)
        return wrong_bucket(bucket) if bucket is not None else None


def receive(
    offer: Offer, seat: tuple[int, int], place: Callable[[], ReceiveBuffer]
) -> ReceiveBuffer:
    """Blocks until the bytes are in the memory that `place` makes, and verified.

    Args:
        offer: by the trainer.
        seat: rank, and ranks in all.
        place: raises CannotFetch where there is no room.

    Raises:
        CannotFetch: there was no broadcast, or it broke.
        EngineFailed: other bytes came than were published.
    """
    meeting = WorkerRendezvous(offer.at, seat)
    try:
        landing = place()
    except CannotFetch as error:
        meeting.join(RankReport(problem=str(error)))  # or the others would wait for this rank
        raise
    meeting.join(RankReport(gpu=landing.gpu))
    meeting.receive(landing.pieces, offer.backend)
    wrong = landing.wrong()
    meeting.report(RankReport(problem=wrong.problem.message if wrong is not None else ""))
    if wrong is not None:
        raise wrong
    return landing
