"""The bytes of a segment, read as they are needed: a file may be larger than memory.

They are not mapped: a writer that cuts its torn tail would kill who reads it.
"""

import os
from pathlib import Path
from typing import Self, overload

WINDOW_BYTES = 1024 * 1024


class SegmentContent:
    """A segment's file as it was when it was opened. A context manager, sliced like bytes."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: it is not there, or cannot be read."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size_bytes = os.fstat(self._fd).st_size
        self._window = b""
        self._window_at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def __len__(self) -> int:
        return self._size_bytes

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> bytes: ...
    def __getitem__(self, key: int | slice) -> int | bytes:
        if isinstance(key, int):
            return self._read(key, key + 1)[0]
        start, stop, _ = key.indices(self._size_bytes)
        return self._read(start, stop)

    def find(self, byte: bytes, start: int) -> int:
        """Where the byte occurs next, from `start` on; -1: nowhere. Holes are passed over."""
        at = start
        while at < self._size_bytes:
            if not self._window_at <= at < self._window_at + len(self._window):
                try:
                    at = os.lseek(self._fd, at, os.SEEK_DATA)
                except OSError:  # nothing but a hole is left
                    return -1
                self._load(at)
                if not self._window:
                    return -1
            found = self._window.find(byte, at - self._window_at)
            if found >= 0:
                return self._window_at + found
            at = self._window_at + len(self._window)
        return -1

    def _read(self, start: int, stop: int) -> bytes:
        if stop - start > WINDOW_BYTES:
            return os.pread(self._fd, stop - start, start)
        if start < self._window_at or stop > self._window_at + len(self._window):
            self._load(start)
        return self._window[start - self._window_at : stop - self._window_at]

    def _load(self, start: int) -> None:
        size_bytes = min(WINDOW_BYTES, self._size_bytes - start)
        self._window_at, self._window = start, os.pread(self._fd, size_bytes, start)
