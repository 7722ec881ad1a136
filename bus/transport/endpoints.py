"""Which addresses may be used: beyond this machine only with keys.

An address may carry the public key of whoever listens there: `tcp://HOST:PORT#KEY`.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from rolloutbus.bus.security.keys import SecuritySettings, check_public_key
from rolloutbus.bus.wire.errors import SettingsError

MAX_IPC_PATH_BYTES = 107
"""Longest path that fits a Unix socket address."""

_WILDCARDS = ("*", "0.0.0.0", "::")  # noqa: S104 - to refuse them
HOW_TO_BE_REACHED = (
    "is the port open to this host in every firewall between, and the address one of the network "
    "that both are on? A worker or store takes the interface that faces its router's address, "
    "unless --stream, --relay, --bulk or --advertise name another one"
)
_TCP = re.compile(r"tcp://(\*|[\w.-]+|\[[^\[\]\s]+\])(:.*)?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_MAKE_KEYS = "make them with `rolloutbus keys new` and `rolloutbus keys allow`"


def split_key(endpoint: str) -> tuple[str, str]:
    """(address, public key of its listener); the key is empty if the endpoint has none.

    Raises:
        SettingsError: what stands after the `#` is no key.
    """
    address, _, key = endpoint.partition("#")
    return address, check_public_key(key) if key else ""


def router_addresses(text: str) -> tuple[str, ...]:
    """The addresses of a fleet's routers, in the order in which they are tried.

    One of them is active, the others stand by: `tcp://10.0.0.1:7777,tcp://10.0.0.2:7777`.

    Raises:
        SettingsError: there is none, one has no valid form, or one stands there twice.
    """
    addresses = tuple(part.strip() for part in text.split(","))
    if len(addresses) > 1 and not all(addresses):
        raise SettingsError(
            f"router: {text[:200]!r} has an empty place: one comma stands between two addresses"
        )
    known: set[str] = set()
    for each in addresses:
        bare, _ = split_key(each)
        is_local(bare)
        if bare in known:
            raise SettingsError(f"router: {bare} stands twice in the list of addresses")
        known.add(bare)
    return addresses


def without_keys(routers: str) -> str:
    """One address, or a list of them, as people are shown it."""
    return ",".join(each.partition("#")[0] for each in routers.split(","))


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


def require_routers(routers: str, security: SecuritySettings | None) -> None:
    """Checks a list of routers to connect to, one or several.

    Raises:
        SettingsError: as `router_addresses`, or as `require_reachable` of one of them.
    """
    for address in router_addresses(routers):
        require_reachable(address, security)


def require_bindable(
    endpoint: str,
    security: SecuritySettings | None,
    *,
    is_router: bool = False,
    is_announced: bool = False,
    is_member: bool = False,
) -> str:
    """An endpoint to listen on: local, or with keys and an allow-list.

    Args:
        endpoint: where.
        security: keys and allow-list, if any.
        is_router: a ROUTER socket, which is never left open to unknown peers beyond this machine.
        is_announced: peers learn of it, so it must name an address that they can reach.
        is_member: a worker or store, which needs no file: the router hands it the allow-list.

    Raises:
        SettingsError: it is beyond this machine, and keys or allow-list are missing.
    """
    address, _ = split_key(endpoint)
    security = security or SecuritySettings()
    has_list = bool(security.allow_list) or (is_member and bool(security.key_file))
    if bool(security.key_file) != has_list:
        raise SettingsError(
            "security: who listens needs both key_file and allow_list; " + _MAKE_KEYS
        )
    if is_announced and is_wildcard(address):
        raise SettingsError(
            f"{address}: peers are told this address, so name one of an interface, or say with "
            "advertise (--advertise HOST) which address they are told instead"
        )
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
    if address.startswith("ipc:"):
        path = address.removeprefix("ipc://")
        if not path or len(path.encode()) > MAX_IPC_PATH_BYTES:
            raise SettingsError(f"{address}: an ipc path has 1 to {MAX_IPC_PATH_BYTES} bytes")
        return True
    if _TCP.fullmatch(address):
        port_of(address)
        if address.rpartition(":")[2].isdecimal():
            return _is_loopback(_host_of(address))
    raise SettingsError(f"{address}: only ipc://PATH and tcp://HOST:PORT may be used")


def advertised(endpoint: str, host: str) -> str:
    """The endpoint as peers are told it: with another host if one is given, else as it is."""
    if not host or not endpoint.startswith("tcp://"):
        return endpoint
    address, key = split_key(endpoint)
    return with_key(f"tcp://{bracketed(host)}:{port_of(address)}", key)


def check_advertised(host: str) -> None:
    """Checks what stands in `advertise`: a host's name or address, without a port.

    Raises:
        SettingsError: it is something else, or an address that means every interface.
    """
    try:
        is_address = bool(ipaddress.ip_address(host))
    except ValueError:
        is_address = False
    if host in _WILDCARDS or not (is_address or _HOST.fullmatch(host)):
        raise SettingsError(
            f"advertise: {host[:100]!r} is neither a host's name nor its address; it has no port: "
            "peers connect to the port that is listened on (see --stream, --relay, --bulk)"
        )


def is_wildcard(address: str) -> bool:
    """Whether an address means every interface of a host, to which peers cannot connect."""
    return _host_of(address) in _WILDCARDS


def bracketed(host: str) -> str:
    """A host as it stands in an endpoint: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def is_out_of_reach(endpoint: str, router: str) -> bool:
    """Whether peers of this router cannot reach an endpoint: it is local to another host.

    Args:
        endpoint: where somebody listens, as the router tells it.
        router: the router's address as we connect to it, or several. If one is no local one, the
            router and those who join it by its local addresses may be on another host than we.
    """
    try:
        return is_local(split_key(endpoint)[0]) and not is_local_router(router)
    except SettingsError:  # whoever connects there says what is wrong with it
        return False


def is_local_router(routers: str) -> bool:
    """Whether a router's address, or each of several, can be reached from this machine only.

    Raises:
        SettingsError: as `router_addresses`.
    """
    return all(is_local(split_key(each)[0]) for each in router_addresses(routers))


def store_out_of_reach(bulk: str) -> str:
    """A sentence for who is on another host than a weight store that serves its own host only."""
    return (
        f"the weight store serves at {split_key(bulk)[0]}, which can be reached from its own host "
        "only: start it with the address by which this host knows the router (--router), or name "
        "its address on the network (--bulk)"
    )


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


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # a bracket without the other one
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
