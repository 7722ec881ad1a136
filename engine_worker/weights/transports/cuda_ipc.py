"""`cuda_ipc`: the trainer's buckets are opened by their handles, on the GPUs of one host.

On the engine's own GPU they are read in place. Those of another GPU are copied first, as its links
allow: the engine swaps weights within its GPU then, and waits for no link.
Spec: docs/protocol.md, "Transports".
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

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
from rolloutbus.bus.weights.rank_group import first_line
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
from rolloutbus.engine_worker.weights.transports.gpu_memory import SpareGpuMemory


class CudaIpc(Fetcher):
    """Opens offers for an engine on one GPU."""

    def __init__(self, gpu_memory: SpareGpuMemory, book: HandleBook | None = None) -> None:
        """`gpu_memory`: of the engine's GPU; `book` notes what is open there."""
        self._gpu_memory = gpu_memory
        self._book = book or HandleBook()
        self._copying = threading.Lock()
        self._device = device_of(gpu_memory.gpu)
        self._memory: CudaMemory | None = None

    def close(self) -> None:
        """Give back the memory that is copied to."""
        self.give_back_spares()

    def give_back_spares(self) -> None:
        """Likewise."""
        self._gpu_memory.clear()

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Open or copy, and verify; see `Fetcher`."""
        del ask, store
        offer = offer_of(manifest, "cuda_ipc")
        if offer.host != host_id():
            raise CannotFetch("the trainer is on another host")
        is_given_up = threading.Event()
        bring = (
            partial(self._open, manifest, offer)
            if offer.at == self._gpu_memory.gpu
            else partial(self._copy, manifest, offer, is_given_up)
        )
        try:
            return await in_daemon_thread(bring, "rolloutbus-cuda-ipc")
        finally:
            is_given_up.set()

    def _open(self, manifest: Manifest, offer: Offer) -> Staged:
        """Leave the bytes where they lie: on this GPU."""
        with torch.cuda.device(self._device), ExitStack() as undo:
            try:
                pieces = [self._piece(bucket, undo) for bucket in offer.buckets]
                wrong = first_wrong(pieces, offer.buckets)
            except (BadHandle, NotLent, CudaError, RuntimeError) as error:
                raise CannotFetch(first_line(error)) from error
            if wrong is not None:
                raise wrong_bucket(wrong)
            release = partial(_release, undo.pop_all(), self._device)
            return in_buckets(
                manifest, "cuda_ipc", offer.buckets, pieces, release, is_in_place=True
            )

    def _piece(self, bucket: Bucket, undo: ExitStack) -> torch.Tensor:
        """A bucket's bytes, open until `undo`."""
        opened = self._opened(bucket)
        handle = unpack_handle(bucket.handle)
        self._book.opened(opened.address, handle.memory, bucket.size_bytes)
        raw = DeviceBytes(opened.address, bucket.size_bytes)
        # A version that is never released is closed with the last tensor of it.
        close = weakref.finalize(raw, _close, opened, self._book)
        close.atexit = False
        undo.callback(close)
        return torch.as_tensor(raw, device=self._device)

    def _copy(self, manifest: Manifest, offer: Offer, is_given_up: threading.Event) -> Staged:
        """Bring them here from another GPU, after what was begun before."""
        pieces: list[torch.Tensor] = []
        with self._copying, torch.cuda.device(self._device):
            if is_given_up.is_set():
                raise CannotFetch("it was given up")
            try:
                self._copy_buckets(offer.buckets, pieces)
                wrong = first_wrong(pieces, offer.buckets)
            except (BadHandle, NotLent, CudaError, RuntimeError) as error:
                pieces.clear()  # the error remembers this frame, and memory is short
                raise CannotFetch(f"from another GPU: {first_line(error)}") from error
        if wrong is not None:
            pieces.clear()
            raise wrong_bucket(wrong)
        release = partial(self._gpu_memory.give_back, pieces)
        return in_buckets(manifest, "cuda_ipc", offer.buckets, pieces, release)

    def _copy_buckets(self, buckets: Sequence[Bucket], pieces: list[torch.Tensor]) -> None:
        """Copy them to memory of this GPU; `pieces` gets it, before anything is copied."""
        stream = cast("Any", torch.cuda).Stream(self._device)  # untyped
        with ExitStack() as undo:
            opened: list[_Opened] = []
            for bucket in buckets:
                opened.append(self._opened(bucket))
                undo.callback(opened[-1].close)
            pieces += self._gpu_memory.take([each.size_bytes for each in buckets])
            try:
                for each, bucket, piece in zip(opened, buckets, pieces, strict=True):
                    place, size_bytes = piece.data_ptr(), bucket.size_bytes
                    each.memory.copy(place, each.address, size_bytes, stream.cuda_stream)
            finally:
                stream.synchronize()  # after an error, too: nothing may be closed before

    def _opened(self, bucket: Bucket) -> "_Opened":
        handle = unpack_handle(bucket.handle)
        memory = self._memory = self._memory or CudaMemory()
        # Borrowed first: the owner must not free what is being opened.
        borrowed = borrow(handle.pid, handle.loan)
        try:
            return _Opened(memory, memory.open(handle.memory, bucket.size_bytes), borrowed)
        except CudaError:
            borrowed.give_back()
            raise


class _Opened(NamedTuple):
    """Memory of the trainer that this process can read."""

    memory: CudaMemory
    address: int
    borrowed: Borrowed

    def close(self) -> None:
        try:
            self.memory.close(self.address)
        finally:
            self.borrowed.give_back()


def _close(opened: _Opened, book: HandleBook) -> None:
    book.closed(opened.address)
    opened.close()


def _release(undo: ExitStack, device: torch.device) -> None:
    """Close everything, once no kernel reads it any more."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        undo.close()
