"""The bytes of one tensor, in host memory or on a device, and GPU memory that processes share."""

import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

import numpy as np

if TYPE_CHECKING:
    import torch


class LentBytes(NamedTuple):
    """Part of an allocation that other processes can open."""

    handle: bytes
    """For `CudaMemory.open`."""
    size_bytes: int
    """Of the allocation."""
    offset: int


class HandleBook:
    """GPU memory here that other processes can open, with its handles. Any thread may call.

    It is another process's that was opened here, or this one's own.
    """

    def __init__(self) -> None:
        # Memory may be freed while garbage is collected, in a thread that is in here.
        self._lock = threading.RLock()
        self._open: dict[int, tuple[bytes, int]] = {}

    def opened(self, address: int, handle: bytes, size_bytes: int) -> None:
        """Memory was opened, or allocated and exported, at this address."""
        with self._lock:
            self._open[address] = handle, size_bytes

    def closed(self, address: int) -> None:
        """The memory at this address was closed, or is about to be freed."""
        with self._lock:
            self._open.pop(address, None)

    def find(self, address: int, size_bytes: int) -> LentBytes | None:
        """The memory in which these bytes lie; None: no other process can open it."""
        with self._lock:
            for start, (handle, room) in [*self._open.items()]:
                if start <= address and address + size_bytes <= start + room:
                    return LentBytes(handle, room, address - start)
        return None


RawTensor: TypeAlias = Union[np.ndarray[tuple[int], np.dtype[np.uint8]], "torch.Tensor"]
"""Raw little-endian bytes: uint8 [size_bytes], in memory or on a device."""
