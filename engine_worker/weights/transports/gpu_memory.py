"""Memory of the engine's GPU for whole versions, which the engine's other processes can open.

All ways that bring bytes to the GPU share it.
"""

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch

from rolloutbus.bus.weights.cuda_memory import CudaError, CudaMemory, DeviceBytes
from rolloutbus.bus.weights.rank_group import first_line
from rolloutbus.engine_worker.weights.raw_tensor import HandleBook
from rolloutbus.engine_worker.weights.torch_tensors import SPARE_BYTES, device_of


class SpareGpuMemory:
    """Holds the memory of at most one version, for the next one."""

    def __init__(self, gpu: str, book: HandleBook | None) -> None:
        """Begins to use the GPU, which takes it 0.1 to 0.3 s and half a GB of its memory.

        Left until there is a version, that holds up the steps that others compute there meanwhile.

        Args:
            gpu: its UUID.
            book: notes how other processes open what is taken; None: none do.
        """
        self.gpu = gpu
        self._device = device_of(gpu)
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:  # whoever needs it later is told again
            _log.warning(
                "GPU %s cannot be used by this process beside its engine, so versions come by shm "
                "or tcp in place of cuda_ipc and nccl; leave the engine less of its memory: %s",
                gpu,
                first_line(error),
            )
        self._book = book
        self._memory: CudaMemory | None = None
        self._lock = threading.Lock()
        self._spare: list[torch.Tensor] = []

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Tensors of these sizes, uint8 [size] each, of any content; freed with the last reference.

        Raises:
            CudaError: there is no room, or no CUDA runtime.
        """
        pieces = self._let_go()
        if [len(each) for each in pieces] != list(sizes):
            pieces.clear()  # given back before more is taken
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()  # what torch keeps for itself is not free for others
                free_bytes: int = cast("Any", torch.cuda).mem_get_info()[0]  # untyped
                if free_bytes < sum(sizes) + SPARE_BYTES:
                    needed = f"{sum(sizes)} and {SPARE_BYTES} to spare are needed"
                    raise CudaError(f"{free_bytes} bytes are free, {needed}")
                pieces += [self._allocate(each) for each in sizes]
        return pieces

    def give_back(self, pieces: Sequence[torch.Tensor]) -> None:
        """Take them back, all that were taken at once; nothing reads them any more."""
        self._let_go()
        with self._lock:
            self._spare = [*pieces]

    def clear(self) -> None:
        """Give the memory back to the system."""
        self._let_go()

    def _let_go(self) -> list[torch.Tensor]:
        with self._lock:
            spare, self._spare = self._spare, []
        return spare

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        memory = self._memory = self._memory or CudaMemory()
        address = memory.allocate(size_bytes)
        raw = DeviceBytes(address, size_bytes)
        freeing = weakref.finalize(raw, _free, memory, address, self._device, self._book)
        freeing.atexit = False
        if self._book is not None:
            self._book.opened(address, memory.export(address), size_bytes)
        return torch.as_tensor(raw, device=self._device)


def _free(memory: CudaMemory, address: int, device: torch.device, book: HandleBook | None) -> None:
    if book is not None:
        book.closed(address)
    with torch.cuda.device(device):
        memory.free(address)


_log = logging.getLogger(__name__)
