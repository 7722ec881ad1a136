"""The files of a journal: segments made, appended to, synced, packed, listed and deleted.

Everything here waits for the disk. Spec: docs/journal.md, "Files".
"""

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self, overload

import msgspec

from rolloutbus.bus.actor.resources import NO_ROOM
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.journal.format import (
    Found,
    Framer,
    JournalError,
    JournalFull,
    framer_of,
    scan,
)
from rolloutbus.replay.journal.pack import packed
from rolloutbus.replay.journal.records import Packed

WINDOW_BYTES = 1024 * 1024


class SegmentContent:
    """A segment's file, up to its size when opened. A context manager, sliced like bytes."""

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


_NAME = re.compile(r"(\d{6,})\.(rbj|rbz)")
_MODE = 0o600
_LOCK = "lock"
_FIRST = "first"
_LOOKS_S = (0.001, 0.01, 0.05)


class SegmentFile(NamedTuple):
    """A segment that is there."""

    number: int
    path: Path

    @property
    def is_packed(self) -> bool:
        """Whether it is closed, whole and compressed."""
        return self.path.suffix == ".rbz"


def segments_in(directory: Path) -> list[SegmentFile]:
    """The segments of a journal, in order; of two of one number the packed one."""
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):  # .rbj comes before .rbz
        match = _NAME.fullmatch(path.name)
        if match and not path.is_file() and path.exists():
            raise SettingsError(f"{path} is no file, so it is no segment of a journal; remove it")
        if match:
            found[int(match[1])] = path
    return [SegmentFile(number, found[number]) for number in sorted(found)]


def content_of(file: SegmentFile) -> SegmentContent | None:
    """The bytes of a segment, which may have been packed since it was listed; None if deleted."""
    for path in (file.path, file.path.with_suffix(".rbz")):
        with suppress(FileNotFoundError):
            return SegmentContent(path)
    return None


class FirstKept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What retention has left of a journal: from here on everything is to be there."""

    segment: int
    seq: int
    """Of its first record."""


def first_kept(directory: Path) -> FirstKept:
    """Where a journal begins; at its very beginning if retention has deleted nothing.

    Raises:
        JournalError: the file that says so is damaged.
    """
    path = directory / _FIRST
    try:
        return msgspec.json.decode(path.read_bytes(), type=FirstKept)
    except FileNotFoundError:
        return FirstKept(1, 0)
    except (OSError, msgspec.DecodeError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from error


def is_being_written(directory: Path) -> bool:
    """Whether a process writes to the journal now."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def unusable(directory: Path, error: OSError) -> SettingsError:
    """Returns the error for a directory that cannot be written; JournalFull if this may pass."""
    kind = JournalFull if error.errno in {*NO_ROOM, errno.EIO} else SettingsError
    return kind(f"{directory}: {error.strerror}")


def check_free(directory: Path) -> None:
    """SettingsError unless this user's next recorder could write in it; nothing new is left there.

    OSError: it is not there.
    """
    _check_closed(directory)
    if (directory / _LOCK).exists():
        os.close(lock(directory))


def _check_closed(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingsError(f"{directory} must be closed to others: chmod 700 {directory}")


def lock(directory: Path) -> int:
    """Makes the directory if missing, and locks it: only one process may write there.

    Returns:
        A descriptor; closing it unlocks.

    Raises:
        SettingsError: another process writes there, or it is not ours alone; JournalFull: no room.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_closed(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / _LOCK, flags, _MODE)
    except OSError as error:
        raise unusable(directory, error) from error
    for wait_s in (*_LOOKS_S, None):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if wait_s is None:
                os.close(descriptor)
                raise SettingsError(f"another recorder writes to {directory}") from error
            time.sleep(wait_s)  # a reader that looks for a writer holds it for a moment
    return descriptor


class JournalSegment:
    """The one segment that is being written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None
        self._size_bytes = 0

    def begin(self, segment: int) -> None:
        """Make its file, which must not exist, and its name durable."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._directory / f"{segment:06d}.rbj", flags, _MODE)
        self._size_bytes = 0
        sync_directory(self._directory)

    def write(self, content: bytes) -> None:
        """Append and sync; what could not be written whole is cut off again.

        Raises:
            OSError: the disk is full, or broken.
        """
        assert self._fd is not None
        try:
            write_all(self._fd, content)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size_bytes)
            raise
        self._size_bytes += len(content)

    def close(self) -> None:
        """Nothing more will be written to it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def pack(directory: Path, segment: int) -> Path:
    """Put the packed form of a closed segment, and where it ends, in its place.

    Raises:
        OSError: no room for it; the segment stays as it is.
        JournalError: it is damaged; it stays as it is, for people to look at.
    """
    plain = directory / f"{segment:06d}.rbj"
    small = plain.with_suffix(".rbz")
    with SegmentContent(plain) as content:
        framer = framer_of(content)
        if framer is None:
            raise JournalError(f"{plain} is damaged: it is left as it is")
        _replace(small, packed(framer, content))
    plain.unlink()
    end = SegmentEnd(segment, _seq_after(SegmentFile(segment, small)))
    with suppress(OSError):  # only a segment that loses its end needs it
        _replace(small.with_suffix(".idx"), [framer.frame(msgspec.msgpack.encode(end))])
    return small


class SegmentEnd(msgspec.Struct, frozen=True):
    """File beside a packed segment that keeps its end, in case the segment itself loses it."""

    segment: int
    next_seq: int
    """Number that follows its last record."""


def next_seq_beside(path: Path, framer: Framer) -> int:
    """The number that follows the last record of a packed segment; 0: it is not known."""
    try:
        content = path.with_suffix(".idx").read_bytes()
        payload = framer.payload_at(content, 0)
        return msgspec.msgpack.decode(payload or b"", type=SegmentEnd).next_seq
    except (OSError, msgspec.DecodeError):
        return 0


def retain(directory: Path, keep_bytes: int, oldest_s: float) -> int:
    """Delete the oldest packed segments; returns how many.

    Segments beyond `keep_bytes` go, and those closed before `oldest_s` (Unix time); 0: none. Before
    that it writes down where the journal begins: a reader then knows that this was on purpose.
    """
    files = [each for each in segments_in(directory) if each.is_packed]
    sizes = {each.number: each.path.stat() for each in files}
    total = sum(status.st_size for status in sizes.values())
    doomed: list[SegmentFile] = []
    for each in files:
        status = sizes[each.number]
        if not (keep_bytes and total > keep_bytes) and status.st_mtime >= oldest_s:
            break
        total -= status.st_size
        doomed.append(each)
    if not doomed:
        return 0
    first = FirstKept(doomed[-1].number + 1, _seq_after(doomed[-1]))
    is_told = False
    with suppress(OSError):  # a full disk: the more reason to delete
        _save_first(directory, first)
        is_told = True
    for each in doomed:
        each.path.unlink()
        each.path.with_suffix(".idx").unlink(missing_ok=True)
    if not is_told:
        _save_first(directory, first)
    return len(doomed)


def forget_first(directory: Path) -> None:
    """The journal begins anew, with its first segment."""
    (directory / _FIRST).unlink(missing_ok=True)


def _save_first(directory: Path, first: FirstKept) -> None:
    _replace(directory / _FIRST, [msgspec.json.encode(first)])


def _seq_after(file: SegmentFile) -> int:
    """Number of the record that comes after a packed segment's last one."""
    with SegmentContent(file.path) as content:
        framer = framer_of(content)
        last = 0
        for found in scan(framer, content) if framer is not None else ():
            if isinstance(found, Found):
                last = found.record.seq
                if isinstance(found.record, Packed):
                    last += found.record.n_records - 1
    if framer is None:
        raise JournalError(f"{file.path} is damaged: it is not deleted")
    return last + 1


def write_all(descriptor: int, content: bytes) -> None:
    """Write, however many calls it takes."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, pieces: Iterable[bytes]) -> None:
    """Make a file of these bytes, all or nothing, durably."""
    temporary = path.with_name(path.name + ".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, _MODE)
    try:
        for piece in pieces:
            write_all(descriptor, piece)
        os.fsync(descriptor)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_directory(path.parent)
