"""Which addresses may be used: beyond this machine only with keys.

An address may carry the public key of whoever listens there: `tcp://HOST:PORT#KEY`.
"""

import ipaddress
from urllib.parse import urlsplit

from rolloutbus.bus.security.keys import SecuritySettings, check_public_key
from rolloutbus.bus.wire.errors import SettingsError

MAX_IPC_PATH_BYTES = 107
"""Longest path that fits a Unix socket address."""

_WILDCARDS = ("*", "0.0.0.0", "::")  # noqa: S104 - to refuse them
_MAKE_KEYS = "make them with `rolloutbus keys new` and `rolloutbus keys allow`"


def split_key(endpoint: str) -> tuple[str, str]:
    """(address, public key of its listener); the key is empty if the endpoint has none.

    Raises:
        SettingsError: what stands after the `#` is no key.
    """
    address, _, key = endpoint.partition("#")
    return address, check_public_key(key) if key else ""


def with_key(address: str, key: str) -> str:
    """The address and the public key of its listener, as one endpoint."""
    return f"{address}#{key}" if key else address


def require_local(endpoint: str) -> str:
    """The endpoint itself, if it can be reached from this machine only.

    Raises:
        SettingsError: it is not `ipc://…` or `tcp://` on a loopback address.
    """
    address, _ = split_key(endpoint)
    if is_local(address):
        return endpoint
    raise SettingsError(
        f"{address}: without keys only ipc://PATH and tcp://127.0.0.1:PORT may be used"
    )


def require_reachable(endpoint: str, security: SecuritySettings | None) -> str:
    """An endpoint to connect to: local, or with keys.

    Raises:
        SettingsError: it is beyond this machine, and a key is missing, ours or theirs.
    """
    address, key = split_key(endpoint)
    security = security or SecuritySettings()
    if key and not security.key_file:
        raise SettingsError(f"{address} asks for a key of yours: set security.key_file (--key)")
    if address.startswith("tcp:") and port_of(address) == 0:
        raise SettingsError(f"{address}: nobody can be reached at port 0; say where they listen")
    has_keys = security.server_keys or security.server_key_file
    if security.key_file and not key and not has_keys:
        raise SettingsError(
            f"{address}: whose key is it? Say {address}#KEY, or set security.server_keys"
        )
    if is_local(address) or security.key_file or security.unsafe_no_auth:
        return endpoint
    raise SettingsError(f"{address} is beyond this machine: set security.key_file; {_MAKE_KEYS}")


def require_bindable(
    endpoint: str,
    security: SecuritySettings | None,
    *,
    is_router: bool = False,
    is_announced: bool = False,
) -> str:
    """An endpoint to listen on: local, or with keys and an allow-list.

    Args:
        endpoint: where.
        security: keys and allow-list, if any.
        is_router: a ROUTER socket, which is never left open to unknown peers beyond this machine.
        is_announced: peers learn of it, so it must name an address that they can reach.

    Raises:
        SettingsError: it is beyond this machine, and keys or allow-list are missing.
    """
    address, _ = split_key(endpoint)
    security = security or SecuritySettings()
    if bool(security.key_file) != bool(security.allow_list):
        raise SettingsError(
            "security: who listens needs both key_file and allow_list; " + _MAKE_KEYS
        )
    if is_announced and (urlsplit(address).hostname or "") in _WILDCARDS:
        raise SettingsError(f"{address}: peers are told this address, so name one of an interface")
    may_be_open = security.unsafe_no_auth and not is_router
    if is_local(address) or security.key_file or may_be_open:
        return endpoint
    raise SettingsError(
        f"{address} is beyond this machine: set security.key_file and security.allow_list; "
        + _MAKE_KEYS
    )


def is_local(address: str) -> bool:
    """Whether it can be reached from this machine only.

    Raises:
        SettingsError: it is neither `ipc://PATH` nor `tcp://HOST:PORT`.
    """
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        path = address.removeprefix("ipc://")
        if not path or len(path.encode()) > MAX_IPC_PATH_BYTES:
            raise SettingsError(f"{address}: an ipc path has 1 to {MAX_IPC_PATH_BYTES} bytes")
        return True
    if parts.scheme == "tcp":
        port_of(address)
        return _is_loopback(parts.hostname or "")
    raise SettingsError(f"{address}: only ipc://PATH and tcp://HOST:PORT may be used")


def port_of(address: str) -> int:
    """The port of a `tcp://` address; 0: a free one.

    libzmq itself takes 99999 for 34463 and 77x for 77: another fleet may listen there.

    Raises:
        SettingsError: there is none, or it is no port.
    """
    try:
        port = urlsplit(address).port
    except ValueError:
        port = None
    if port is None:
        raise SettingsError(
            f"{address[:100]}: its port is a number from 1 to 65535 (0: a free one)"
        )
    return port


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
