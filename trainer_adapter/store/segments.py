"""The store's shared-memory segments: made once, reused for version after version, swept at last.

Pages of a fresh segment cost ten times the copy into it, so retired segments wait here for a
version of their size. A segment is rewritten only under an exclusive `flock`, which a reader's
pin denies. Which store owns a segment is in its name; the owner holds a lock file for life, so
that anyone can tell, across process namespaces too, whose segments are left over. A store that
goes on after one that died becomes the same owner: no name changes that a ledger knows.
"""

import fcntl
import mmap
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.weights.shm import SHM_DIR, SegmentGone, open_segment

GRAIN_BYTES = 4 * 1024 * 1024
"""Segment sizes are multiples of this, so that slightly different versions share segments."""
HEADROOM_BYTES = 64 * 1024 * 1024
"""Left free in /dev/shm for everyone else."""
SPARE_SEGMENTS = 2
"""Free segments kept for reuse; more go back to the system."""
AHEAD_BYTES = 64 * 1024 * 1024
"""Made ahead at once; smaller segments are made when they are needed."""
SWEEP_AGE_S = 60.0
"""A store's lock file this old, and not locked, belongs to a store that will not be restarted."""
_DYING_S = 1.0
"""For the kernel to take a lock from a process that was killed."""
_PACE_S = 0.01
"""Between two tries to get it."""


class StoreFull(OSError):
    """Shared memory has no room for another version."""


@dataclass(slots=True)
class _Segment:
    name: str
    fd: int
    size_bytes: int
    content: Bytes


@dataclass(slots=True)
class _Unfinished:
    """A segment of which some pages are there."""

    name: str
    fd: int
    size_bytes: int
    n_made: int = 0


class SegmentPool:
    """All segments of one store process. Not thread-safe, but `content` may be used anywhere."""

    def __init__(self, directory: Path = SHM_DIR, former_owner: str = "") -> None:
        """`former_owner` is that of a store that died, whose segments are to be adopted, if any."""
        self._directory = directory
        same = _same_owner(directory, former_owner) if former_owner else None
        self.owner, self._lock_fd = same or _new_owner(directory)
        """16 hex digits in the name of everything this pool makes."""
        self._used: dict[str, _Segment] = {}
        self._retired: list[_Segment] = []
        self._free: list[_Segment] = []
        self._ahead: _Unfinished | None = None

    def take(self, size_bytes: int) -> str:
        """Name of a segment to be written, of at least `size_bytes`; no reader can pin it yet.

        Raises:
            StoreFull: there is no room.
        """
        try:
            self.collect()
            segment = self._reuse(size_bytes) or self._make(size_bytes)
        except StoreFull:
            raise
        except OSError as error:  # whatever it is: this version cannot be, the others go on
            raise StoreFull(f"{self._directory}: {error}") from error
        self._used[segment.name] = segment
        return segment.name

    def freeze(self, name: str) -> None:
        """The segment is written: readers may pin it from now on."""
        fcntl.flock(self._used[name].fd, fcntl.LOCK_UN)

    def content(self, name: str) -> Bytes:
        """All bytes of a segment in use, uint8 [at least what was asked for]."""
        return self._used[name].content

    def retire(self, name: str, *, is_reusable: bool) -> None:
        """Take the segment back, for reuse as soon as no reader has it pinned.

        One that somebody may still be writing to is not reusable: it goes back to the system.
        """
        segment = self._used.pop(name)
        if is_reusable:
            self._retired.append(segment)
        else:
            self._unlink(segment)
        self.collect()

    def collect(self) -> None:
        """Move unpinned retired segments to the free ones; give back what exceeds the spares.

        Called every few seconds, it also shows sweeps that this store lived until now.
        """
        os.utime(self._lock_fd)
        self._drop_deleted()
        for segment in list(self._retired):
            if _try_lock(segment.fd):
                self._retired.remove(segment)
                try:
                    # Renamed at once: a name stands for one version's bytes for ever.
                    self._rename(segment)
                except SegmentGone:
                    self._drop(segment)
                else:
                    self._free.append(segment)
        while len(self._free) > SPARE_SEGMENTS:
            self._unlink(self._free.pop(0))

    def make_ahead(self, size_bytes: int) -> bool:
        """Make a part of a segment for such a version, if the next one would have to wait for it.

        Returns whether there is more to make. Nothing is made where not as much again is free.
        """
        if self._ahead is None:
            self.collect()
            waiting = [*self._free, *self._retired]
            is_there = any(_fits(size_bytes, each.size_bytes) for each in waiting)
            is_small = size_bytes < AHEAD_BYTES
            if is_small or is_there or not self._has_room(2 * _rounded(size_bytes)):
                return False
        try:
            segment = self._ahead = self._ahead or self._begin(size_bytes)
            self._grow(segment, AHEAD_BYTES)
            if segment.n_made < segment.size_bytes:
                return True
            self._free.append(self._complete(segment))
        except OSError:  # others were faster: the next version is told if there is no room then
            pass
        self._ahead = None
        return False

    def adopt(self, name: str, size_bytes: int) -> None:
        """Take over a sealed segment of the store that died.

        Raises:
            SegmentGone: it is not there any more, or its owner is another store.
        """
        if not name.startswith(self._prefix):
            raise SegmentGone(f"segment {name} is another store's")
        self._used[name] = _map(name, open_segment(self._directory, name, size_bytes, os.O_RDWR))

    def drop_others(self) -> None:
        """Unlink what the store that died left behind and is not in use now."""
        for path in self._directory.glob(f"{self._prefix}*"):
            if path.name not in self._used and not path.is_dir():  # no segment is one
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlink everything; pinned segments live on until their readers let go."""
        for segment in self._used.values():
            self._unlink(segment)
        self._used.clear()
        self.leave()

    def leave(self) -> None:
        """Unlink only what is not in use: the rest is there for a successor to `adopt`.

        If none comes it is swept, as what a killed store leaves behind.
        """
        for segment in [*self._retired, *self._free]:
            self._unlink(segment)
        self._retired.clear()
        self._free.clear()
        self._drop_ahead()
        if self._used:
            os.utime(self._lock_fd)  # the time for a successor runs from now on
        else:
            _lock_path(self._directory, self.owner).unlink(missing_ok=True)
        for segment in self._used.values():
            os.close(segment.fd)
        self._used.clear()
        os.close(self._lock_fd)

    def _reuse(self, size_bytes: int) -> _Segment | None:
        fitting = [each for each in self._free if _fits(size_bytes, each.size_bytes)]
        if not fitting:
            return None
        segment = min(fitting, key=lambda each: each.size_bytes)
        self._free.remove(segment)
        return segment

    def _make(self, size_bytes: int) -> _Segment:
        if self._ahead is not None and _fits(size_bytes, self._ahead.size_bytes):
            unfinished, self._ahead = self._ahead, None
        else:
            unfinished = self._begin(size_bytes)
        self._grow(unfinished, unfinished.size_bytes)
        return self._complete(unfinished)

    def _begin(self, size_bytes: int) -> _Unfinished:
        """A segment without pages.

        Raises:
            StoreFull: there is no room for them.
        """
        rounded = _rounded(size_bytes)
        if not self._has_room(rounded):
            self._drop_ahead()
            while self._free:
                self._unlink(self._free.pop())
            if not self._has_room(rounded):
                raise StoreFull(f"{self._directory} has no room for {rounded} more bytes")
        name = self._new_name()
        try:
            fd = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise StoreFull(f"{self._directory}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        return _Unfinished(name, fd, rounded)

    def _grow(self, segment: _Unfinished, n_bytes: int) -> None:
        """Make so many bytes more of it, at most all.

        Raises:
            StoreFull: there is no room; nothing of it is left.
        """
        n_bytes = min(n_bytes, segment.size_bytes - segment.n_made)
        try:
            # Takes the pages now: without it a full tmpfs would kill the writer with SIGBUS.
            os.posix_fallocate(segment.fd, segment.n_made, n_bytes)
        except OSError as error:
            self._unlink(segment)
            raise StoreFull(f"{self._directory}: {error.strerror}") from error
        segment.n_made += n_bytes

    def _complete(self, segment: _Unfinished) -> _Segment:
        """The segment, all of whose pages are there.

        Raises:
            StoreFull: it cannot be mapped; nothing of it is left.
        """
        try:
            return _map(segment.name, segment.fd)
        except OSError as error:
            self._unlink(segment)
            raise StoreFull(f"{self._directory}: {error.strerror}") from error

    def _drop_deleted(self) -> None:
        """Let go of segments that others have deleted: no writer could open them."""
        for segment in [each for each in self._free if not self._is_there(each)]:
            self._free.remove(segment)
            self._drop(segment)
        if self._ahead is not None and not self._is_there(self._ahead):
            self._drop(self._ahead)
            self._ahead = None

    def _drop(self, segment: _Segment | _Unfinished) -> None:
        warn(
            f"somebody deleted {self._directory / segment.name}, which is this store's: its memory "
            "is not used again"
        )
        self._unlink(segment)

    def _is_there(self, segment: _Segment | _Unfinished) -> bool:
        return (self._directory / segment.name).exists()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._unlink(self._ahead)
            self._ahead = None

    def _has_room(self, size_bytes: int) -> bool:
        usage = os.statvfs(self._directory)
        return usage.f_bavail * usage.f_frsize >= size_bytes + HEADROOM_BYTES

    def _rename(self, segment: _Segment) -> None:
        """Give it a new name.

        Raises:
            SegmentGone: others have deleted it.
        """
        name = self._new_name()
        try:
            (self._directory / segment.name).rename(self._directory / name)
        except FileNotFoundError as error:
            raise SegmentGone(f"segment {segment.name} was deleted") from error
        segment.name = name

    @property
    def _prefix(self) -> str:
        return f"rolloutbus-{self.owner}-"

    def _new_name(self) -> str:
        return f"{self._prefix}{secrets.token_hex(8)}"

    def _unlink(self, segment: _Segment | _Unfinished) -> None:
        (self._directory / segment.name).unlink(missing_ok=True)
        os.close(segment.fd)


def sweep(directory: Path = SHM_DIR, *, min_age_s: float = SWEEP_AGE_S) -> list[str]:
    """Unlink the segments of this user's stores that are dead; returns the segments' names.

    A store that died less than `min_age_s` ago may be about to be restarted and to adopt its
    segments: it is left alone.
    """
    swept: list[str] = []
    for lock in directory.glob("rolloutbus-*.lock"):
        owner = lock.name.removeprefix("rolloutbus-").removesuffix(".lock")
        try:
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or another sweep was faster
            continue
        is_old = time.time() - os.fstat(fd).st_mtime >= min_age_s
        # Another sweep may have deleted it since it was opened, and a store made it anew.
        if is_old and _try_lock(fd) and os.fstat(fd).st_nlink:
            for path in sorted(directory.glob(f"rolloutbus-{owner}-*")):
                path.unlink(missing_ok=True)
                swept.append(path.name)
            lock.unlink(missing_ok=True)
        os.close(fd)
    return swept


def _same_owner(directory: Path, owner: str) -> tuple[str, int] | None:
    """The owner, with its lock; None if another process has that, as the store of a copied ledger.

    Then its segments are not to be adopted: that store lives, or a sweep is deleting them.
    """
    path = _lock_path(directory, owner)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # another user's
        return None
    give_up_at = time.monotonic() + _DYING_S
    while not (is_locked := _try_lock(fd)) and time.monotonic() < give_up_at:
        time.sleep(_PACE_S)
    status = os.fstat(fd)
    if is_locked and status.st_nlink and status.st_uid == os.geteuid():
        os.utime(fd)  # should this store die at once, the time for a successor runs from now on
        return owner, fd
    os.close(fd)
    return None


def _new_owner(directory: Path) -> tuple[str, int]:
    while True:
        owner = secrets.token_hex(8)
        path = _lock_path(directory, owner)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # A sweep may have taken the new file for a dead owner's: then it is locked or gone.
        if _try_lock(fd) and path.exists():
            return owner, fd
        os.close(fd)
        path.unlink(missing_ok=True)


def _lock_path(directory: Path, owner: str) -> Path:
    return directory / f"rolloutbus-{owner}.lock"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _map(name: str, fd: int) -> _Segment:
    size_bytes = os.fstat(fd).st_size
    content = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
    return _Segment(name, fd, size_bytes, content)


def _rounded(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // GRAIN_BYTES) * GRAIN_BYTES


def _fits(wanted_bytes: int, size_bytes: int) -> bool:
    return wanted_bytes <= size_bytes <= wanted_bytes + wanted_bytes // 4 + GRAIN_BYTES
