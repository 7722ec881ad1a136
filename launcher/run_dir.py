"""A directory per running fleet: sockets, logs, the store's record; gone when the fleet is.

Fleets of one user live side by side in `$XDG_RUNTIME_DIR/rolloutbus-UID`, or below /tmp. Each
holds a lock on its own directory, so that what a killed launcher left behind is known for dead
and removed by the next one.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Self

from rolloutbus.bus.wire.errors import SettingsError

_LOCK = "lock"
_OURS = b"a fleet of rolloutbus\n"
"""In the lock of a directory that was given to a fleet: all in it is that fleet's."""
_KEPT = "kept"
"""Marks what was left behind on purpose."""


def user_dir() -> Path:
    """This user's own directory for run-time files, mode 0700; made if needed.

    Raises:
        SettingsError: somebody else owns it.
    """
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(parent) / f"rolloutbus-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise SettingsError(f"cannot use {path}: {error.strerror}") from error
    # Anybody can make a file in /tmp: only our own directory keeps others off our sockets.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SettingsError(f"cannot use {path}: it is not a directory of this user's")
    path.chmod(0o700)
    return path


class RunDirectory:
    """The directory of one fleet. A context manager: leaving it removes the directory.

    A link in its place stays, as does what it points to, which is empty then.
    """

    def __init__(self, path: Path | None = None, *, keep_logs: bool = False) -> None:
        """Use `path`, which must be empty or absent; None: a fresh one of this user's."""
        self._given = path
        self._keep_logs = keep_logs
        self._lock = -1
        self.path = path or Path()

    def __enter__(self) -> Self:
        if self._given is None:
            base = user_dir()
            with locked(base):
                _sweep(base)
                self.path = base / f"run-{secrets.token_hex(4)}"
                self._make()
        else:
            self.path = self._given.absolute()
            self._make()
        return self

    def __exit__(self, *_: object) -> None:
        kept: tuple[str, ...] = ()
        if self._keep_logs:
            (self.path / _KEPT).touch()
            kept = self.logs.name, _KEPT
        if kept or self.path.is_symlink():
            for entry in self.path.iterdir():
                if entry.name not in kept:
                    _remove(entry)
        else:
            _remove(self.path)
        os.close(self._lock)

    @property
    def logs(self) -> Path:
        """Holds one file per process."""
        return self.path / "logs"

    def ipc(self, name: str) -> str:
        """Endpoint of a socket in this directory."""
        return f"ipc://{self.path / name}"

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                self._clear_after_the_dead()
            self.path.chmod(0o700)
            self.logs.mkdir()
            self._lock = take_lock(self.path / _LOCK, blocking=True)
            os.write(self._lock, _OURS)
        except OSError as error:
            raise SettingsError(f"run_dir: cannot use {self.path}: {error.strerror}") from error

    def _clear_after_the_dead(self) -> None:
        """Removes the files of a fleet if its launcher was killed; refuses any other content."""
        lock = self.path / _LOCK
        if not lock.is_file() or lock.read_bytes() != _OURS or (self.path / _KEPT).exists():
            raise SettingsError(f"run_dir: {self.path} is not empty")
        try:
            descriptor = take_lock(lock, blocking=False)
        except BlockingIOError as error:
            raise SettingsError(f"run_dir: a fleet that runs uses {self.path}") from error
        for entry in self.path.iterdir():
            _remove(entry)
        os.close(descriptor)


def _sweep(base: Path) -> None:
    """Removes the directories of fleets after their launchers were killed."""
    for path in base.glob("run-*"):
        if (path / _KEPT).exists():
            continue
        try:
            lock = take_lock(path / _LOCK, blocking=False)
        except OSError:
            continue
        _remove(path)
        os.close(lock)


@contextlib.contextmanager
def locked(base: Path) -> Generator[None]:
    """Inside, no other process of this user looks at or changes what lies in `user_dir`."""
    lock = take_lock(base / _LOCK, blocking=True)
    try:
        yield
    finally:
        os.close(lock)


def take_lock(path: Path, *, blocking: bool) -> int:
    """Lock a file; the lock lasts until the descriptor is closed or its process ends.

    Raises:
        OSError: somebody else holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path) -> None:
    """Of a link, the link itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
