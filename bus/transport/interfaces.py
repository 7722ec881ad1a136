"""Addresses of this host's own interfaces, as the system's routing table knows them."""

import ipaddress
import socket
from urllib.parse import urlsplit

from rolloutbus.bus.transport.endpoints import (
    bracketed,
    is_local,
    is_wildcard,
    port_of,
    router_addresses,
    split_key,
)
from rolloutbus.bus.wire.errors import SettingsError

LOOPBACK = "tcp://127.0.0.1:0"
_ANY_PORT = 9
"""Nothing is sent there: connecting a UDP socket only asks the routing table."""


def facing(router: str) -> str:
    """Returns an endpoint to listen on, with a free port, that peers of this router can reach.

    That is the interface from which we reach the router. A router's address on this host that
    others can reach gives itself, and a local one the loopback. Of several routers, the first that
    is not local counts.

    Raises:
        SettingsError: the router's host has no address, or no interface leads there; or what is
            given means every interface of a host.
    """
    addresses = [split_key(each)[0] for each in router_addresses(router)]
    address = next((each for each in addresses if not is_local(each)), "")
    if not address:
        return LOOPBACK
    host = urlsplit(address).hostname or ""
    if is_wildcard(address):
        raise SettingsError(f"{address}: name the router's address on the network to connect to")
    try:
        own = _own_address_towards(host, port_of(address))
    except OSError as error:
        raise SettingsError(
            f"{address}: no interface of this host leads there ({error.strerror or error}): name "
            "the address to listen on (--stream, or a store's --bulk)"
        ) from error
    return f"tcp://{bracketed(own)}:0"


def is_own(address: str) -> bool:
    """Whether this IP address is one of this host's; False for what is none."""
    try:
        plain = _plain(address)
        return plain == _own_address_towards(plain, _ANY_PORT)
    except (OSError, ValueError):
        return False


def _own_address_towards(host: str, port: int) -> str:
    """The address that packets for this host leave with; its own if it is one of ours."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return _plain(str(probe.getsockname()[0]))


def _plain(address: str) -> str:
    """Canonical form; an IPv4 address that was written as IPv6 becomes IPv4."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)
