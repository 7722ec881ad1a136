"""Buffers for weight versions: one that is used again, and memory that other processes can map.

Fresh pages cost ten times the copy.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rolloutbus.bus.weights.manifest import Bytes

OWN_FILES = Path("/proc/self/fd")


class FileBytes(NamedTuple):
    """Bytes that this process has mapped from a file."""

    path: str
    """Opens the file in any process of this user, as long as this one has it mapped."""
    offset: int


class _Region(NamedTuple):
    start: int
    stop: int
    offset: int
    inode: tuple[int, int]


def shared_buffer(size_bytes: int) -> Bytes:
    """Fresh memory that `Whereabouts` finds, uint8; freed with the last reference to it."""
    fd = os.memfd_create("rolloutbus")
    try:
        os.ftruncate(fd, max(size_bytes, 1))
        # The mapping keeps a descriptor of its own.
        return np.frombuffer(mmap.mmap(fd, max(size_bytes, 1)), np.uint8)[:size_bytes]
    finally:
        os.close(fd)


class Whereabouts:
    """Finds the files that memory of this process was mapped from, as of when this is made."""

    def __init__(self) -> None:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        self._regions = [region for line in lines if (region := _region(line)) is not None]
        self._starts = [each.start for each in self._regions]
        self._paths = _open_files()

    def of(self, content: Bytes) -> FileBytes | None:
        """Where these contiguous bytes lie; None: in memory of this process alone."""
        if not content.nbytes:
            return None
        address = content.ctypes.data
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        region = self._regions[index]
        path = self._paths.get(region.inode)
        if path is None or address + content.nbytes > region.stop:
            return None
        return FileBytes(path, region.offset + address - region.start)


def _region(line: str) -> _Region | None:
    """One line of the kernel's list; None: it is no file's."""
    addresses, _, offset, device, inode, *_ = line.split(maxsplit=5)
    if inode == "0":
        return None
    start, stop = (int(each, 16) for each in addresses.split("-"))
    major, minor = (int(each, 16) for each in device.split(":"))
    return _Region(start, stop, int(offset, 16), (os.makedev(major, minor), int(inode)))


def _open_files() -> dict[tuple[int, int], str]:
    """A path for each file that this process has open, by device and inode."""
    paths: dict[tuple[int, int], str] = {}
    for entry in OWN_FILES.iterdir():
        try:
            status = entry.stat()
        except OSError:  # the directory itself, read a moment ago
            continue
        paths[status.st_dev, status.st_ino] = f"/proc/{os.getpid()}/fd/{entry.name}"
    return paths


def _ignore(_: Bytes) -> None:
    """No one reads a spare buffer."""


def fresh_buffer(size_bytes: int) -> Bytes:
    """Memory of this process, uint8."""
    return np.empty(size_bytes, np.uint8)


class SpareBuffer:
    """Holds at most one buffer, for the next version."""

    def __init__(
        self,
        on_gone: Callable[[Bytes], None] = _ignore,
        make: Callable[[int], Bytes] = fresh_buffer,
    ) -> None:
        """`on_gone` is called before a buffer is written again or freed; `make` makes one."""
        self._spare: Bytes | None = None
        self._on_gone = on_gone
        self._make = make

    def take(self, size_bytes: int) -> Bytes:
        """A buffer of exactly that size, uint8; its content is arbitrary."""
        spare = self._let_go()
        if spare is None or len(spare) < size_bytes:
            spare = self._make(size_bytes)
        return spare[:size_bytes]

    def give_back(self, buffer: Bytes) -> None:
        """Take a buffer back, whole; it keeps its content until it is taken again."""
        self._let_go()
        self._spare = whole(buffer)

    def clear(self) -> None:
        """Give the memory back to the system."""
        self._let_go()

    def _let_go(self) -> Bytes | None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self._on_gone(spare)
        return spare


def whole(buffer: Bytes) -> Bytes:
    """The buffer that this one is a part of."""
    return buffer if buffer.base is None else np.asarray(buffer.base)
