"""Mapped host memory that GPUs copy from and to by themselves, at the speed of their link.

Pinning costs more than the copy, so it is done once for memory that is used again and again, in
a thread beside the work. Until it is done, and where it cannot be done, copies take the longer way
through a smaller buffer: whether a piece of memory is pinned is asked of CUDA for each piece.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator

from rolloutbus.bus.weights.cuda_memory import CudaError, CudaMemory
from rolloutbus.bus.weights.manifest import Bytes

SLICE_BYTES = 32 << 20
"""Pinned at once. The GPU's driver does nothing else meanwhile: a step would wait for it."""


def cut(address: int, size_bytes: int, most_bytes: int = SLICE_BYTES) -> Iterator[tuple[int, int]]:
    """(start, stop) of the pieces of `size_bytes` bytes at `address`, each within one slice.

    Slices end at multiples of `SLICE_BYTES` of the address: CUDA copies nothing across their ends.
    A piece has at most `most_bytes`.
    """
    start = 0
    while start < size_bytes:
        left = SLICE_BYTES - (address + start) % SLICE_BYTES
        stop = min(size_bytes, start + min(left, most_bytes))
        yield start, stop
        start = stop


class PinnedBytes:
    """Memory that is being pinned, or has been, from the making of this until `close`."""

    def __init__(self, content: Bytes, device: int) -> None:
        """Begins at once, in a thread.

        Args:
            content: uint8, a whole mapping; kept until `close` has undone the pinning.
            device: number of a GPU that this process uses anyway.
        """
        self._content: Bytes | None = content
        self._device = device
        self._is_wanted = True
        self._pinned: list[int] = []
        """Addresses."""
        self._pinning = self._in_thread(self._pin)

    def wait(self) -> None:
        """Until all is pinned that can be."""
        self._pinning.join()

    def close(self) -> None:
        """Undo it, in a thread; no copy may be under way. Idempotent."""
        if self._is_wanted:
            self._is_wanted = False
            self._in_thread(self._unpin)

    def _in_thread(self, work: Callable[[], None]) -> threading.Thread:
        # A daemon: a process that ends does not wait for it.
        thread = threading.Thread(target=work, name="rolloutbus-pinning", daemon=True)
        thread.start()
        return thread

    def _pin(self) -> None:
        assert self._content is not None, "it is kept until after this"
        address = self._content.ctypes.data
        try:
            memory = CudaMemory()
            memory.use(self._device)
            for start, stop in cut(address, len(self._content)):
                if not self._is_wanted:
                    return
                began = time.perf_counter()
                memory.pin(address + start, stop - start)
                self._pinned.append(address + start)
                time.sleep(time.perf_counter() - began)  # others use the driver, too
        except CudaError as error:
            _log.warning(
                "%d of %d MiB for weight versions were pinned: copies between them and a GPU are "
                "slower. %s",
                len(self._pinned) * SLICE_BYTES >> 20,
                len(self._content) >> 20,
                error,
            )

    def _unpin(self) -> None:
        self._pinning.join()
        if self._pinned:
            memory = CudaMemory()
            memory.use(self._device)
            for address in self._pinned:
                memory.unpin(address)
        self._content = None


_log = logging.getLogger(__name__)
