r"""The store's durable record: checksummed lines, appended and synced before anyone acts on them.

A line is `<crc32 as 8 hex digits> <JSON>\n`. A crash can only tear the last line, which then never
happened; damage anywhere else means lost decisions, and the ledger refuses to open.
"""

import fcntl
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bus.errors import SettingsError
from trainer_adapter.store.records import Record

_CRC_DIGITS = 8


class Ledger:
    """One file of records, locked by the one store that uses it."""

    def __init__(self, path: Path) -> None:
        """Open or make the file and read it.

        Raises:
            SettingsError: another store uses it, or it is damaged.
        """
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = _lock(path.with_suffix(".lock"))
        try:
            content = path.read_bytes() if path.exists() else b""
            self.records, n_good = _read(path, content)
            """Everything written so far, by this and earlier processes."""
        except SettingsError:
            os.close(self._lock_fd)
            raise
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, n_good)
        os.lseek(self._fd, 0, os.SEEK_END)
        _sync_dir(path.parent)

    def append(self, record: Record) -> None:
        """Write one record; returns when it would survive a power cut."""
        _write_all(self._fd, _line(record))
        os.fdatasync(self._fd)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the whole file by these records, all or nothing."""
        temporary = self.path.with_suffix(".new")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _write_all(fd, b"".join(map(_line, records)))
        os.fsync(fd)
        temporary.rename(self.path)
        _sync_dir(self.path.parent)
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Let another store use it."""
        os.close(self._fd)
        os.close(self._lock_fd)


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


def _read(path: Path, content: bytes) -> tuple[list[Record], int]:
    """The records, and how many bytes hold them; a torn last line is left out."""
    records: list[Record] = []
    n_good = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        record = _parse(line)
        if record is None:
            if n_good + len(line) == len(content):
                break
            raise SettingsError(
                f"{path} is damaged at line {number}: restore it from a backup, or point the store "
                "at an empty directory and restart the workers"
            )
        records.append(record)
        n_good += len(line)
    return records, n_good


def _parse(line: bytes) -> Record | None:
    """The record of a whole, undamaged line."""
    text = line[_CRC_DIGITS + 1 : -1]
    if not line.endswith(b"\n") or line[: _CRC_DIGITS + 1] != b"%08x " % zlib.crc32(text):
        return None
    return msgspec.json.decode(text, type=Record)


def _write_all(fd: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.write(fd, content[written:])


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
