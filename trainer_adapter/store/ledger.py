r"""The store's durable record: checksummed lines, appended and synced before anyone acts on them.

A line is `<crc32 as 8 hex digits> <JSON>\n`. A crash can only tear the last line, which then never
happened; damage anywhere else means lost decisions, and the ledger refuses to open. Zeros behind
the last line are room that was taken beforehand: a full disk shows before anything is decided.
"""

import fcntl
import os
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.trainer_adapter.store.versions import Record

LEDGER_FILE = "versions.ledger"
"""In the directory of a store."""
_CRC_DIGITS = 8
SPARE_BYTES = 64 * 1024
"""Of room that is kept for what must be written down whatever happens."""
_GRAIN_BYTES = 256 * 1024
"""Room is taken in such portions."""
_BLOCK_BYTES = 1024 * 1024
GROWTH_BYTES = 16 * 1024 * 1024
"""By which a ledger is longer than twice what it was, when it is to be shortened."""


class LedgerUnsure(BusError):
    """It is not known what the ledger holds: a line may be there or not, or a power cut undo it.

    Nothing may be decided any more: the store ends, and the next one reads what is there.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        """`path` is the file or directory that could not be written."""
        super().__init__(
            f"the store ends, as its ledger cannot be written: {path}: {error.strerror}; the "
            "versions are kept in shared memory: mend that disk, or make room on it, and start the "
            "store again with the same directory"
        )


class Ledger:
    """One file of records, locked by the one store that uses it."""

    def __init__(self, path: Path) -> None:
        """Open or make the file and check it.

        Raises:
            SettingsError: another store uses it, or it is damaged.
        """
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = _lock(_lock_of(path))
        try:
            n_good = _whole_bytes(path) if path.exists() else 0
        except SettingsError:
            os.close(self._lock_fd)
            raise
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes, self._room_bytes = n_good, os.fstat(self._fd).st_size
        """Of the records, and of the file."""
        self._long_bytes = GROWTH_BYTES
        self._cut()
        sync_directory(path.parent)

    def read(self) -> Iterator[Record]:
        """Everything written so far, by this and earlier processes; one record at a time.

        Most of it is history, of more bytes than a process should hold.

        Raises:
            SettingsError: it was damaged since it was opened.
        """
        n_read = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if n_read >= self._size_bytes:
                    return
                text = _text(line)
                if text is None:
                    raise _damaged(self.path, number)
                n_read += len(line)
                yield msgspec.json.decode(text, type=Record)

    @property
    def is_long(self) -> bool:
        """Whether most of it may be history: see `rewrite`."""
        return self._size_bytes > self._long_bytes

    def put_off(self) -> None:
        """It cannot be shortened: it is not long until it has grown again."""
        self._long_bytes = self._size_bytes + GROWTH_BYTES

    def append(self, *records: Record) -> None:
        """Write records; returns when they would survive a power cut.

        Raises:
            OSError: none of them is there; or it is not known, until the ledger is read again.
        """
        content = b"".join(map(_line, records))
        try:
            _write_all(self._fd, content, self._size_bytes)
            os.fdatasync(self._fd)
        except OSError:
            self._cut()
            raise
        self._size_bytes += len(content)
        self._room_bytes = max(self._room_bytes, self._size_bytes)

    def make_room(self, size_bytes: int) -> None:
        """Take room for so many bytes of records, and some to spare, before they are decided on.

        Raises:
            OSError: the disk is full.
        """
        missing = self._size_bytes + size_bytes + SPARE_BYTES - self._room_bytes
        if missing > 0:
            portion = -(-missing // _GRAIN_BYTES) * _GRAIN_BYTES
            os.posix_fallocate(self._fd, self._room_bytes, portion)
            self._room_bytes += portion

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the whole file by these records, all or nothing, with as much room for more.

        Raises:
            OSError: the disk is full; the old file is as it was.
            LedgerUnsure: the new file is in use, but its name may not be durable.
        """
        content = b"".join(map(_line, records))
        # What was decided and is not written down yet counts on the room that was made for it.
        spare_bytes = max(_GRAIN_BYTES, self._room_bytes - self._size_bytes)
        temporary = self.path.with_suffix(".new")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, content, 0)
            os.posix_fallocate(fd, len(content), spare_bytes)
            os.fsync(fd)
            temporary.rename(self.path)
        except OSError:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        # At once: whatever fails now, the old file has no name any more.
        os.close(self._fd)
        self._fd, self._size_bytes = fd, len(content)
        self._room_bytes = len(content) + spare_bytes
        self._long_bytes = 2 * len(content) + GROWTH_BYTES
        try:
            sync_directory(self.path.parent)
        except OSError as error:
            raise LedgerUnsure(self.path.parent, error) from error

    def _cut(self) -> None:
        """Put zeros over what was not written whole: it never happened. Its room stays taken."""
        left_bytes = os.fstat(self._fd).st_size - self._size_bytes
        left = os.pread(self._fd, left_bytes, self._size_bytes)
        if left.strip(b"\0"):
            _write_all(self._fd, bytes(len(left)), self._size_bytes)
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Let another store use it."""
        os.close(self._fd)
        os.close(self._lock_fd)


def check_free(directory: Path) -> None:
    """SettingsError if a store uses the ledger in this directory; nothing new is left there."""
    path = _lock_of(directory / LEDGER_FILE)
    if path.exists():
        os.close(_lock(path))


def _lock_of(ledger: Path) -> Path:
    return ledger.with_suffix(".lock")


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise SettingsError(f"another weight store uses {path.parent}") from error
    return fd


def _line(record: Record) -> bytes:
    text = msgspec.json.encode(record)
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _whole_bytes(path: Path) -> int:
    """How many bytes hold the records; a torn last line is left out."""
    n_good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if _text(line) is None:
                rest = iter(partial(file.read, _BLOCK_BYTES), b"")
                if any(block.strip(b"\0") for block in rest):
                    raise _damaged(path, number)
                break
            n_good += len(line)
    return n_good


def _damaged(path: Path, number: int) -> SettingsError:
    return SettingsError(
        f"{path} is damaged at line {number}: restore it from a backup, or point the store "
        "at an empty directory and restart the workers"
    )


def _text(line: bytes) -> bytes | None:
    """The JSON of a whole, undamaged line."""
    text = line[_CRC_DIGITS + 1 : -1]
    if not line.endswith(b"\n") or line[: _CRC_DIGITS + 1] != b"%08x " % zlib.crc32(text):
        return None
    return text


def _write_all(fd: int, content: bytes, offset: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(fd, content[written:], offset + written)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
