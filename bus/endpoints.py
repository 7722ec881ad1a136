"""Which addresses may be used: ipc and loopback only, as long as links are not authenticated."""

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from bus.errors import SettingsError

MAX_IPC_PATH_BYTES = 107
"""Longest path that fits a Unix socket address."""


def require_local(endpoint: str) -> str:
    """The endpoint itself, if nobody outside this machine can reach it.

    Raises:
        SettingsError: it is not `ipc://…` or `tcp://` on a loopback address.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        path = endpoint.removeprefix("ipc://")
        if not path or len(path.encode()) > MAX_IPC_PATH_BYTES:
            msg = f"{endpoint}: an ipc path has 1 to {MAX_IPC_PATH_BYTES} bytes"
            raise SettingsError(msg)
        return endpoint
    if parts.scheme == "tcp" and _is_loopback(parts.hostname or ""):
        return endpoint
    msg = (
        f"{endpoint}: only ipc://PATH and tcp://127.0.0.1:PORT may be used, because links carry "
        "no authentication yet"
    )
    raise SettingsError(msg)


def private_dir(path: Path) -> Path:
    """`path`, made if needed and closed to other users (mode 0700)."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
