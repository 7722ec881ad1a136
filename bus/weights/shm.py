"""Mapping shared-memory segments that the weight store owns, and pinning them while they are read.

A segment is a file under /dev/shm with a random name, mode 0600. The store reuses its segments,
because the page faults of a fresh one cost ten times the copy, and gives each reuse a new name. A
reader pins what it reads with a shared `flock`: the store rewrites a segment only under an
exclusive one, and the kernel lets go of a dead reader's lock. `multiprocessing.shared_memory` is
not used: its resource tracker unlinks segments that others still use.
"""

import fcntl
import mmap
import os
import re
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.weights.page_lock import PageLock

SHM_DIR = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """This boot of this kernel, and this mount of /dev/shm: containers usually have their own."""
    device = SHM_DIR.stat().st_dev
    return f"{_BOOT_ID.read_text().strip()}:{device:x}"


SEGMENT_NAME = re.compile(r"rolloutbus-[0-9a-f]{16}-[0-9a-f]{16}")
_KEPT_MAPPINGS = 8
"""Enough for the versions a store rotates through by default."""


class SegmentGone(OSError):
    """No such segment, or it is being rewritten for another version: ask the store again."""


class _HeldBytes:
    """Bytes that every array made of them holds; none is a copy."""

    def __init__(self, content: Bytes) -> None:
        self._content = content
        self.__array_interface__ = content.__array_interface__


class PinnedSegment:
    """The bytes of one segment; they do not change until `release`, or while an array is held."""

    def __init__(self, fd: int, content: Bytes) -> None:
        held = _HeldBytes(content)
        self.content = np.asarray(held)
        """uint8 [size_bytes]."""
        # Not with this object: whoever reads has only the arrays.
        self._close = weakref.finalize(held, os.close, fd)
        self._close.atexit = False

    def release(self) -> None:
        """The store may reuse the segment from now on; idempotent."""
        self._close()


_MEMORY_FILE = "/memfd:"


class Mappings:
    """Mappings by inode, kept after use: mapped again, a file costs no page fault.

    Any thread may call.
    """

    def __init__(self, access: int, flags: int) -> None:
        """`access`: of `mmap`; `flags`: of `os.open`."""
        self._access = access
        self._flags = flags
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], tuple[int, Bytes]] = {}
        self._locks: dict[tuple[int, int], PageLock] = {}

    def __del__(self) -> None:
        for fd, _ in self._kept.values():  # what is page-locked lets go by itself
            os.close(fd)

    def of(self, fd: int) -> Bytes:
        """The whole file behind `fd`, uint8 [its size]."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            self._forget_unlinked()
            if key not in self._kept:
                while len(self._kept) >= _KEPT_MAPPINGS:
                    self._forget(next(iter(self._kept)))
                # Opened anew: a mapping keeps its descriptor's lock, and this one shall have none.
                own_fd = os.open(f"/proc/self/fd/{fd}", self._flags | os.O_CLOEXEC)
                mapped = mmap.mmap(own_fd, status.st_size, access=self._access)
                self._kept[key] = (own_fd, np.frombuffer(mapped, np.uint8))
            return self._kept[key][1]

    def lock_pages(self, device: int, is_computing: Callable[[], bool] = lambda: True) -> None:
        """Begin to page-lock all that is mapped; arguments of `PageLock`."""
        with self._lock:
            for key, (_, content) in self._kept.items():
                if key not in self._locks:
                    self._locks[key] = PageLock(content, device, is_computing)

    def tidy(self) -> None:
        """Unmap what its store has given back to the system."""
        with self._lock:
            self._forget_unlinked()

    def clear(self) -> None:
        """Unmap all segments of which no array is held."""
        with self._lock:
            for key in list(self._kept):
                self._forget(key)

    def _forget_unlinked(self) -> None:
        # A mapping keeps the memory of a segment that its store has given back to the system.
        for key, (fd, _) in list(self._kept.items()):
            if _is_unlinked(fd):
                self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        os.close(self._kept.pop(key)[0])
        if key in self._locks:
            self._locks.pop(key).close()


def _is_unlinked(fd: int) -> bool:
    """Whether a file that had a name has none any more."""
    if os.fstat(fd).st_nlink:
        return False
    return not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(_MEMORY_FILE)


class SegmentReader:
    """Reads segments in place."""

    def __init__(self, directory: Path = SHM_DIR) -> None:
        self._directory = directory
        self._mappings = Mappings(mmap.ACCESS_COPY, os.O_RDONLY)

    def pin(self, name: str, size_bytes: int) -> PinnedSegment:
        """Map the segment and keep the store from reusing it.

        The array is a private copy-on-write view: writing to it reaches nobody else.

        Raises:
            SegmentGone: it is not there any more, or it is too small, or it is not ours.
        """
        fd = open_segment(self._directory, name, size_bytes, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _require_name(self._directory, name, fd)
            content = self._mappings.of(fd)
        except BlockingIOError as error:
            os.close(fd)
            raise SegmentGone(f"segment {name} is being rewritten") from error
        except BaseException:
            os.close(fd)
            raise
        return PinnedSegment(fd, content[:size_bytes])

    def forget(self) -> None:
        """Unmap all segments of which no array is held."""
        self._mappings.clear()


class SegmentWriter:
    """Writes into reserved segments."""

    def __init__(self, directory: Path = SHM_DIR) -> None:
        self._directory = directory
        self._mappings = Mappings(mmap.ACCESS_WRITE, os.O_RDWR)

    def content(self, name: str, size_bytes: int) -> Bytes:
        """Writable bytes of the segment, uint8 [size_bytes].

        Raises:
            SegmentGone: the reservation has lapsed.
        """
        fd = open_segment(self._directory, name, size_bytes, os.O_RDWR)
        try:
            return self._mappings.of(fd)[:size_bytes]
        finally:
            os.close(fd)

    def lock_pages(self, device: int) -> None:
        """Page-lock what was written, for the next versions that are copied there from a GPU.

        `device`: number of a GPU that this process uses anyway.
        """
        self._mappings.lock_pages(device)

    def tidy(self) -> None:
        """Let go of segments that the store has given up, or their memory would stay taken."""
        self._mappings.tidy()

    def forget(self) -> None:
        """Unmap all segments of which no array is held."""
        self._mappings.clear()


def open_segment(directory: Path, name: str, size_bytes: int, flags: int) -> int:
    """Descriptor of a segment that is a private file of this user and large enough.

    Raises:
        SegmentGone: it is not.
    """
    if SEGMENT_NAME.fullmatch(name) is None:
        raise SegmentGone(f"{name[:80]!r} is not the name of a segment")
    try:
        fd = os.open(directory / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentGone(f"segment {name} cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    if not (stat.S_ISREG(status.st_mode) and is_private and status.st_size >= size_bytes):
        os.close(fd)
        raise SegmentGone(f"segment {name} is not a private file of {size_bytes} bytes")
    return fd


def _require_name(directory: Path, name: str, fd: int) -> None:
    """Check that `name` still means this file: a reused segment has a new name.

    Raises:
        SegmentGone: it does not.
    """
    try:
        named = (directory / name).stat(follow_symlinks=False)
    except FileNotFoundError as error:
        raise SegmentGone(f"segment {name} was reused") from error
    opened = os.fstat(fd)
    if (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
        raise SegmentGone(f"segment {name} was reused")
