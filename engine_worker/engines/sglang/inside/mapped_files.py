"""Files of the engine host that a scheduler process has mapped: weights, and room for answers."""

import mmap
import os
from pathlib import Path

import numpy as np

from rolloutbus.bus.weights.manifest import Bytes

_KEPT = 4
"""Enough for those that a host rotates through."""
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
