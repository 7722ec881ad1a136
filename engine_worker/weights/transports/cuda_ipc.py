"""`cuda_ipc`: the trainer's buckets are opened on the GPU that both use, and read in place.

Spec: docs/protocol.md, "Transports".
"""

import weakref
from contextlib import ExitStack
from functools import partial

import torch

from rolloutbus.bus.actor.loop import in_daemon_thread
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.cuda_memory import (
    BadHandle,
    Borrowed,
    CudaError,
    CudaMemory,
    DeviceBytes,
    NotLent,
    borrow,
    unpack_handle,
)
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.messages.weights import Bucket, Manifest, Offer, PrepareUpdate
from rolloutbus.engine_worker.weights.raw_tensor import HandleBook
from rolloutbus.engine_worker.weights.staged import CannotFetch, Fetcher, Staged
from rolloutbus.engine_worker.weights.torch_tensors import device_of, first_wrong
from rolloutbus.engine_worker.weights.transports.buckets import (
    in_buckets,
    offer_of,
    wrong_bucket,
)


class CudaIpc(Fetcher):
    """Opens offers on one GPU."""

    def __init__(self, gpu: str, book: HandleBook | None = None) -> None:
        """`gpu`: UUID of the one that holds the engine's weights; `book` notes what is open."""
        self._book = book or HandleBook()
        self._gpu = gpu
        self._device = device_of(gpu)
        self._memory: CudaMemory | None = None

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Open and verify; see `Fetcher`."""
        del ask, store
        offer = offer_of(manifest, "cuda_ipc")
        if offer.host != host_id():
            raise CannotFetch("the trainer is on another host")
        if offer.at != self._gpu:
            raise CannotFetch("the trainer's copy is on another GPU")
        return await in_daemon_thread(partial(self._open, manifest, offer), "rolloutbus-cuda-ipc")

    def _open(self, manifest: Manifest, offer: Offer) -> Staged:
        with torch.cuda.device(self._device), ExitStack() as undo:
            try:
                pieces = [self._open_bucket(bucket, undo) for bucket in offer.buckets]
            except (BadHandle, NotLent, CudaError) as error:
                raise CannotFetch(str(error)) from error
            wrong = first_wrong(pieces, offer.buckets)
            if wrong is not None:
                raise wrong_bucket(wrong)
            release = partial(_release, undo.pop_all(), self._device)
            return in_buckets(manifest, "cuda_ipc", offer.buckets, pieces, release)

    def _open_bucket(self, bucket: Bucket, undo: ExitStack) -> torch.Tensor:
        handle = unpack_handle(bucket.handle)
        if self._memory is None:
            self._memory = CudaMemory()
        # Borrowed first: the owner must not free what is being opened.
        borrowed = borrow(handle.pid, handle.loan)
        try:
            address = self._memory.open(handle.memory, bucket.size_bytes)
        except CudaError:
            borrowed.give_back()
            raise
        self._book.opened(address, handle.memory, bucket.size_bytes)
        raw = DeviceBytes(address, bucket.size_bytes)
        # A version that is never released is closed with the last tensor of it.
        close = weakref.finalize(raw, _close, self._memory, address, borrowed, self._book)
        close.atexit = False
        undo.callback(close)
        return torch.as_tensor(raw, device=self._device)


def _close(memory: CudaMemory, address: int, borrowed: Borrowed, book: HandleBook) -> None:
    book.closed(address)
    memory.close(address)
    borrowed.give_back()


def _release(undo: ExitStack, device: torch.device) -> None:
    """Close everything, once no kernel reads it any more."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        undo.close()
