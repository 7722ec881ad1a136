"""Versions at hand in a scheduler process: mapped, copied to its GPU, or opened there.

All of it is done in threads beside the steps, so that the pause for an update is that of the copy
into the model and no more.
"""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from rolloutbus.bus.weights.cuda_memory import CudaMemory, DeviceBytes
from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.weights.shm import Mappings
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    CheckpointTensor,
    Lent,
    Placed,
    Stage,
)
from rolloutbus.engine_worker.weights.torch_tensors import TORCH_TYPES, DeviceCopies

_KEPT = 8
"""Enough for the versions that a store rotates through by default."""
_MEMORY_FILE = "/memfd:"


class MappedFiles:
    """Mappings by inode, kept after use: mapped again, a file costs no page fault."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Bytes] = {}

    def of(self, path: str, *, for_writing: bool = False) -> Bytes:
        """The whole file, uint8 [its size]. Without `for_writing` what is written stays here.

        Raises:
            OSError: it is not there.
        """
        fd = os.open(path, (os.O_RDWR if for_writing else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            key = (status.st_dev, status.st_ino)
            content = self._kept.pop(key, None)
            if content is None or len(content) < status.st_size:
                access = mmap.ACCESS_WRITE if for_writing else mmap.ACCESS_COPY
                content = np.frombuffer(mmap.mmap(fd, status.st_size, access=access), np.uint8)
            if status.st_nlink or str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(
                _MEMORY_FILE
            ):
                self._keep(key, content)
        finally:
            os.close(fd)
        return content

    def _keep(self, key: tuple[int, int], content: Bytes) -> None:
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = content


PAGE_BYTES = mmap.PAGESIZE

NamedTensors = list[tuple[str, torch.Tensor]]


class Staging:
    """What is staged, for one device; `stage` comes from one thread at a time."""

    def __init__(self, device: torch.device, is_computing: Callable[[], bool]) -> None:
        """`is_computing`: whether requests run, which copies and page-locking may not hold up."""
        self._device = device
        self._is_computing = is_computing
        self._files = MappedFiles()
        self._shared = Mappings(mmap.ACCESS_WRITE, os.O_RDWR)
        """What was copied to the device. CUDA page-locks only mappings that may be written to."""
        self._copies = DeviceCopies(device, is_computing)
        self._held: dict[int, NamedTensors] = {}
        self._memory: CudaMemory | None = None
        self._open: dict[int, list[int]] = {}
        """Version -> addresses of what other processes lend."""

    def stage(self, order: Stage) -> None:
        """Bring the bytes of a version as near as there is room.

        Raises:
            OSError, CudaError: they cannot be opened.
            ValueError: a file is too small.
        """
        raws: dict[str, torch.Tensor] = {}
        raws |= self._copied(order)
        if not raws:
            contents = [self._mapped(path) for path in order.files]
            in_files = _in_files(order, contents)
            raws |= {name: torch.as_tensor(raw) for name, raw in in_files.items()}
        raws |= self._opened(order)
        tensors = [each.tensor for each in (*order.tensors, *order.lent)]
        self._held[order.version] = [
            (each.name, raws[each.name].view(TORCH_TYPES[each.dtype]).view(each.shape))
            for each in tensors
        ]

    def tensors(self, version: int) -> NamedTensors | None:
        """Of a staged version, on the device or in host memory; None: it is not staged."""
        return self._held.get(version)

    def drop(self, version: int) -> None:
        """Forget a version that nothing reads any more. Idempotent."""
        self._held.pop(version, None)
        self._copies.drop(version)
        if self._device.type == "cuda":  # only now: it is in the way of a swap
            self._shared.lock_pages(self._device.index, self._is_computing)
        for address in self._open.pop(version, ()):
            assert self._memory is not None, "it was opened with it"
            with torch.cuda.device(self._device):
                self._memory.close(address)

    def give_back_spares(self) -> None:
        """Give back memory of the device that is kept for the next version."""
        self._copies.give_back_spare()

    def _copied(self, order: Stage) -> Mapping[str, torch.Tensor]:
        """The tensors in files, on the device; none if it has no room for them, or is a CPU."""
        if self._device.type == "cpu" or not order.tensors:
            self._copies.stage(order.version, {})  # gives back what was kept for the next version
            return {}
        contents: list[Bytes] = []
        for path in order.files:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                contents.append(self._shared.of(fd))
            finally:
                os.close(fd)
        self._copies.stage(order.version, _in_files(order, contents))
        copied = self._copies.of(order.version)
        if not copied:
            self._shared.clear()  # nothing is copied from there: it shall not be page-locked
        return copied

    def _mapped(self, path: str) -> Bytes:
        content = self._files.of(path)
        # The first touch of each page costs as much as its copy: here nobody waits for it.
        content[::PAGE_BYTES].max(initial=0)
        return content

    def _opened(self, order: Stage) -> Mapping[str, torch.Tensor]:
        """Memory that other processes lend, uint8 [size_bytes] for each tensor in it."""
        if not order.lent:
            return {}
        wholes: dict[bytes, torch.Tensor] = {}
        with torch.cuda.device(self._device):
            for each in order.lent:
                if each.handle not in wholes:
                    wholes[each.handle] = self._open_whole(order.version, each)
        return {
            each.tensor.name: wholes[each.handle][each.offset : each.offset + size_of(each.tensor)]
            for each in order.lent
        }

    def _open_whole(self, version: int, lent: Lent) -> torch.Tensor:
        if self._memory is None:
            self._memory = CudaMemory()
        address = self._memory.open(lent.handle, lent.size_bytes)
        self._open.setdefault(version, []).append(address)
        return torch.as_tensor(DeviceBytes(address, lent.size_bytes), device=self._device)


def size_of(tensor: CheckpointTensor) -> int:
    """In bytes."""
    return prod(tensor.shape) * TORCH_TYPES[tensor.dtype].itemsize


def _in_files(order: Stage, contents: Sequence[Bytes]) -> dict[str, Bytes]:
    """Bytes of the tensors that lie in files."""
    return {each.tensor.name: _bytes_of(contents[each.file], each) for each in order.tensors}


def _bytes_of(content: Bytes, placed: Placed) -> Bytes:
    end = placed.offset + size_of(placed.tensor)
    if end > len(content):
        raise ValueError(f"tensor {placed.tensor.name!r} lies beyond the end of its file")
    return content[placed.offset : end]
