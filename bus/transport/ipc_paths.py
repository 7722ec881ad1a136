"""Ipc paths on disk: who can reach them, and whether somebody listens there already."""

import errno
import os
import socket
from pathlib import Path

from rolloutbus.bus.wire.errors import SettingsError

_OTHERS = 0o077
"""Permissions of the group and of everybody else."""


def is_taken(endpoint: str) -> bool:
    """Whether somebody listens on this ipc path; False for other endpoints.

    libzmq would take the path over without a word, and leave its owner deaf.
    """
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # a full backlog is an answer, too
        return probe.connect_ex(endpoint.removeprefix("ipc://")) in (0, errno.EAGAIN)


def require_private_dir(endpoint: str) -> None:
    """Whoever can reach an ipc path without a lock can take every role.

    Raises:
        SettingsError: its directory is not this user's alone.
    """
    if not endpoint.startswith("ipc://"):
        return
    directory = Path(endpoint.removeprefix("ipc://")).absolute().parent
    try:
        found = directory.stat()
    except OSError as error:
        raise SettingsError(f"{endpoint}: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise SettingsError(f"{endpoint}: {directory} must be this user's alone: chmod 700 it")


def private_dir(path: Path) -> Path:
    """`path`, made if needed and closed to other users (mode 0700)."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path
