"""Page-locked host memory, which CUDA calls pinned: GPUs copy from and to it by themselves.

Locking costs more than the copy, so it is done once for memory that is used again and again, in
a thread beside the work. Until it is done, and where it cannot be done, copies take the longer way
through a smaller buffer: whether a piece of memory is locked is asked of CUDA for each piece.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

from rolloutbus.bus.weights.cuda_memory import CudaError, CudaMemory
from rolloutbus.bus.weights.manifest import Bytes

SLICE_BYTES = 32 << 20
"""Locked or unlocked at once. The GPU's driver does nothing else meanwhile: a step waits for it."""
_PAUSES = 4
"""Left to the steps after a slice, as a multiple of its time: with 1 a prompt took 3.6 times as
long while pages were locked, with 4 it took 1.2 times as long."""


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


class PageLock:
    """Memory that is being locked, or has been, from the making of this until `close`.

    Memory that was unmapped while it was locked would stay locked: whatever is mapped at its
    address afterwards, the GPU would write to the old pages. So this is closed, too, when nobody
    holds it any more, and the memory stays mapped until all is undone, or for ever.
    """

    def __init__(
        self, content: Bytes, device: int, is_computing: Callable[[], bool] = lambda: True
    ) -> None:
        """Begins at once, in a thread; where it fails, a line of the log says so.

        Args:
            content: uint8, a whole mapping; kept until `close` has undone the locking.
            device: number of a GPU that this process uses anyway.
            is_computing: whether the GPU has steps to do, which this would hold up; asked in its
                threads, slice by slice. To lock and to unlock takes five times as long meanwhile.
                Slices of all memory take turns.
        """
        slices = _LockedSlices(content, device, is_computing)
        self._locking = _in_thread(slices.lock)
        self._undo = weakref.finalize(self, slices.begin_to_unlock, self._locking)
        self._undo.atexit = False  # the system undoes it then

    def wait(self) -> None:
        """Until all is locked that can be."""
        self._locking.join()

    def close(self) -> None:
        """Undo it, in a thread; no copy may be under way. Idempotent."""
        self._undo()


class _LockedSlices:
    """The slices of one `PageLock`, which its threads hold; they do not hold the lock itself."""

    def __init__(self, content: Bytes, device: int, is_computing: Callable[[], bool]) -> None:
        self._content = content
        self._device = device
        self._is_computing = is_computing
        self._is_wanted = True
        self._locked: list[int] = []
        """Addresses."""

    def lock(self) -> None:
        """Lock one after another, until all are or they are not wanted any more."""
        address, size_bytes = self._content.ctypes.data, len(self._content)
        try:
            memory = CudaMemory()
            memory.use(self._device)
            for start, stop in cut(address, size_bytes):
                with self._turn():
                    if not self._is_wanted:
                        return
                    memory.lock_pages(address + start, stop - start)
                    self._locked.append(address + start)
        except (CudaError, OSError) as error:
            _log.warning(
                "page-locked %d of %d slices of memory for weights: copies between the rest and a "
                "GPU are slower; %s",
                len(self._locked),
                sum(1 for _ in cut(address, size_bytes)),
                error,
            )

    def begin_to_unlock(self, locking: threading.Thread) -> None:
        """Undo it once `locking` has ended; in a thread, and never in the one that calls."""
        self._is_wanted = False
        try:
            _in_thread(partial(self._unlock, locking))
        except RuntimeError as error:  # no thread begins any more: the process ends
            self._keep_mapped(error)

    def _unlock(self, locking: threading.Thread) -> None:
        locking.join()
        if not self._locked:
            return
        try:
            memory = CudaMemory()
            memory.use(self._device)
            while self._locked:
                with self._turn():
                    memory.unlock_pages(self._locked[-1])
                    self._locked.pop()
        except (CudaError, OSError) as error:
            self._keep_mapped(error)

    @contextmanager
    def _turn(self) -> Generator[None]:
        """Wait until no other slice of this process has its turn, and end it with a pause."""
        with _turns:
            began = time.perf_counter()
            yield
            if self._is_computing():
                time.sleep((time.perf_counter() - began) * _PAUSES)

    def _keep_mapped(self, error: Exception) -> None:
        _never_unmapped.append(self._content)
        _log.warning(
            "%d bytes of memory for weights stay mapped until this process ends, for %d slices of "
            "it may still be page-locked; %s",
            len(self._content),
            len(self._locked),
            error,
        )


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    """A process that ends does not wait for it."""
    thread = threading.Thread(target=work, name="rolloutbus-page-lock", daemon=True)
    thread.start()
    return thread


_turns = threading.Lock()
"""Of slices, pauses included: each mapping has a thread, and five at once leave steps no pause."""
_never_unmapped: list[Bytes] = []
"""What CUDA still takes for locked."""

_log = logging.getLogger(__name__)
