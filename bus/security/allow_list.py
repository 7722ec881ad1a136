"""The allow-list: a file that says which public keys may come in, and as whom."""

import fcntl
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rolloutbus.bus.security.key_files import OTHERS_MAY_WRITE
from rolloutbus.bus.security.principals import Principal, Principals, by_key
from rolloutbus.bus.wire.errors import SettingsError

MAX_FILE_BYTES = 16 * 1024 * 1024


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    principals: list[Principal] = []


class AllowList:
    """Reads the file, and reads it again when it has changed."""

    def __init__(self, path: str | Path) -> None:
        """Read it.

        Raises:
            SettingsError: it cannot be read, says nonsense, or others may write it.
        """
        self._path = Path(path)
        self._seen = self._stamp()
        self.principals: Principals = by_key(read_allow_list(self._path))
        """Public key -> whose it is."""
        self.problem = ""
        """Why the file as it is now is not used; then the last good one still holds."""

    def refresh(self) -> bool:
        """Look at the file; True if it says something new."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                self.problem = ""
                return False
            principals = by_key(read_allow_list(self._path))
        except SettingsError as error:
            self.problem = str(error)
            return False
        self._seen, self.problem = stamp, ""
        has_changed = principals != self.principals
        self.principals = principals
        return has_changed

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise SettingsError(f"cannot read {self._path}: {error.strerror}") from error
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def read_allow_list(path: Path) -> list[Principal]:
    """What the file says.

    Raises:
        SettingsError: it cannot be read, says nonsense, or others may write it.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & OTHERS_MAY_WRITE:
                raise SettingsError(f"{path}: only this user or root may be able to write it")
            content = file.read(MAX_FILE_BYTES)
        return msgspec.json.decode(content, type=_File).principals
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: {error}") from error


def edit_allow_list(path: Path, edit: Callable[[list[Principal]], Sequence[Principal]]) -> None:
    """Change the file in one piece, made if needed: readers see the old list or the new one.

    Raises:
        SettingsError: what comes out is no list that could be used; nothing has changed.
    """
    if not path.parent.is_dir():
        raise SettingsError(f"{path}: there is no directory {path.parent}: make it first")
    try:
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        edited = list(edit(read_allow_list(path) if path.exists() else []))
        by_key(edited)
        text = msgspec.json.format(msgspec.json.encode(_File(edited)), indent=2)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(text + b"\n")
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    finally:
        os.close(lock)
