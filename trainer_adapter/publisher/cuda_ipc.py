"""`cuda_ipc`: a copy of the weights in GPU memory that workers of the same host open.

Spec: docs/protocol.md, "Transports".
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch

from rolloutbus.bus.weights.cuda_memory import CudaError, CudaHandle, CudaMemory, DeviceBytes, Loan
from rolloutbus.bus.weights.rank_group import first_line
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.messages.weights import Bucket, Offer, Tensor
from rolloutbus.trainer_adapter.publisher.offering import (
    BucketSpan,
    checksums_of,
    fill,
    gpu_uuid,
    only_gpu,
    spans_of,
)
from rolloutbus.trainer_adapter.publisher.tensor_source import QueuedWork
from rolloutbus.trainer_adapter.publisher.weight_writer import in_thread

BUCKET_BYTES = 2 << 30
_log = logging.getLogger(__name__)


class _Lent:
    """One allocation that others may open."""

    def __init__(self, memory: CudaMemory, size_bytes: int, device: torch.device) -> None:
        self._memory = memory
        self._address = memory.allocate(size_bytes)
        try:
            self._handle = memory.export(self._address)
            self.loan = Loan()
        except BaseException:
            memory.free(self._address)
            raise
        self.size_bytes = size_bytes
        self.device = device
        raw = torch.as_tensor(DeviceBytes(self._address, size_bytes), device=device)
        self.content = raw.zero_()
        """uint8 [size_bytes]; gaps between tensors stay zero or hold what was there before."""

    @property
    def handle(self) -> bytes:
        """What a worker opens it with."""
        return CudaHandle(self._handle, *self.loan.name).pack()

    def free(self) -> None:
        """Only when it is recalled."""
        self.loan.close()
        self._memory.free(self._address)


class CudaIpcOffering:
    """See `Offering`. Holds a second copy of the weights on the GPU, from version to version.

    The copy is left alone while any worker has it open. A worker that dies lets go of it; one that
    hangs keeps its memory, and the next version gets other memory.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._memory: CudaMemory | None = None
        self._lent: list[_Lent] = []

    @property
    def held_bytes(self) -> int:
        """GPU memory that is held for versions, those that a worker still reads among them."""
        return sum(each.size_bytes for each in self._lent)

    async def prepare(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Offer]:
        """See `Offering`; all tensors have to be on one GPU."""
        device = only_gpu(tensors)
        if device is None:
            return []
        queued = QueuedWork(tensors)
        try:
            # To its end: it would go on alone, and into the next version.
            buckets = await in_thread(partial(self._copy, layout, tensors, device, queued))
        except (CudaError, torch.OutOfMemoryError) as error:
            self.forget()
            _log.warning("no copy of the weights on the GPU for its workers: %s", first_line(error))
            return []
        return [Offer("cuda_ipc", at=gpu_uuid(device), host=host_id(), buckets=buckets)]

    async def serve(self) -> None:
        """Workers help themselves."""

    def call_off(self) -> None:
        """Nothing to do: no worker waits for another here."""

    async def close(self) -> None:
        """Nothing to do: see the class."""

    def forget(self) -> None:
        """Free what no worker has open."""
        free = [each for each in self._lent if each.loan.recall()]
        self._lent = [each for each in self._lent if each not in free]
        for each in free:
            with torch.cuda.device(each.device):
                each.free()

    def _copy(
        self,
        layout: Sequence[Tensor],
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        queued: QueuedWork,
    ) -> list[Bucket]:
        queued.wait()
        with torch.cuda.device(device):
            spans = list(spans_of(layout, self._bucket_bytes))
            lent = self._take(spans, device)
            for span, each in zip(spans, lent, strict=True):
                fill(each.content, span, layout, tensors)
            pieces = [
                each.content[: span.size_bytes] for span, each in zip(spans, lent, strict=True)
            ]
            buckets = [
                Bucket(span.start, span.size_bytes, checksum, each.handle)
                for span, each, checksum in zip(spans, lent, checksums_of(pieces), strict=True)
            ]
            torch.cuda.current_stream().synchronize()
        for each in lent:
            each.loan.lend()
        return buckets

    def _take(self, spans: Sequence[BucketSpan], device: torch.device) -> list[_Lent]:
        """Take memory for each span: what was lent and fits, else new; what fits none is freed."""
        free = [each for each in self._lent if each.device == device and each.loan.recall()]
        taken = [_fitting(span.size_bytes, free) for span in spans]
        for each in free:
            self._lent.remove(each)
            each.free()
        return [
            each or self._allocate(span.size_bytes, device)
            for span, each in zip(spans, taken, strict=True)
        ]

    def _allocate(self, size_bytes: int, device: torch.device) -> _Lent:
        if self._memory is None:
            self._memory = CudaMemory()
        try:
            lent = _Lent(self._memory, size_bytes, device)
        except CudaError:
            torch.cuda.empty_cache()  # what torch keeps for itself is not free for others
            lent = _Lent(self._memory, size_bytes, device)
        self._lent.append(lent)
        return lent


def _fitting(size_bytes: int, free: list[_Lent]) -> _Lent | None:
    """Taken out of `free`."""
    for each in free:
        if each.size_bytes == size_bytes:
            free.remove(each)
            return each
    return None
