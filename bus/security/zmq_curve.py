"""Making CURVE keys and putting them on sockets that listen or connect."""

import sys
from collections.abc import Sequence

import zmq
from zmq.utils import z85

from rolloutbus.bus.security.key_files import read_key_pair, read_public_key
from rolloutbus.bus.security.keys import KeyPair, SecuritySettings
from rolloutbus.bus.transport.endpoints import split_key
from rolloutbus.bus.wire.errors import SettingsError


def new_key_pair(name: str) -> KeyPair:
    """A fresh pair, from the system's randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(name, z85.decode(public).hex(), z85.decode(secret))


def pair_of_secret(name: str, secret: bytes) -> KeyPair:
    """The pair that a secret of 32 bytes is half of."""
    public = zmq.curve_public(z85.encode(secret))
    return KeyPair(name, z85.decode(public).hex(), secret)


def dress_server(socket: zmq.Socket[bytes], pair: KeyPair, domain: str) -> None:
    """Before a socket binds: only keys that the ZAP handler of its context knows come in.

    Without ZAP_ENFORCE_DOMAIN a context whose handler has died would let every key in.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.reveal())
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def dress_client(socket: zmq.Socket[bytes], pair: KeyPair, server_key: str) -> None:
    """Before a socket connects: it speaks to the holder of `server_key` alone."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.reveal())
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))


class Dialer:
    """Puts keys on sockets that connect. An endpoint's own key goes before the list."""

    def __init__(
        self, pair: KeyPair, server_keys: Sequence[str] = (), server_key_file: str = ""
    ) -> None:
        """Connect as the holder of `pair`.

        Args:
            pair: our own.
            server_keys: what a router may prove to hold, besides the key in its endpoint.
            server_key_file: holds one more, which may change meanwhile.
        """
        self._pair = pair
        self._server_keys = list(server_keys)
        self._server_key_file = server_key_file
        self._next: dict[str, int] = {}
        """Endpoint with a choice of keys -> which one to try next."""
        self._last: dict[str, int] = {}

    @property
    def name(self) -> str:
        """Name of the principal who owns the key."""
        return self._pair.name

    @property
    def exact(self) -> "Dialer":
        """A dialer for endpoints that peers have sent: each has its key, and no other will do."""
        return Dialer(self._pair)

    def dress(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Put keys on a socket before it connects; returns the bare address.

        A router that changes its key has two meanwhile: each try after one that was not
        `answered` takes the next.

        Raises:
            SettingsError: there is no key to expect there.
        """
        address, key = split_key(endpoint)
        known = [*([key] if key else []), *self._server_keys, *self._key_in_file()]
        keys = list(dict.fromkeys(known))
        if not keys:
            raise SettingsError(
                f"{address}: whose key is it? Say {address}#KEY, or set security.server_keys"
            )
        turn = self._next.get(endpoint, 0)
        if len(keys) > 1:
            self._last[endpoint], self._next[endpoint] = turn, turn + 1
        dress_client(socket, self._pair, keys[turn % len(keys)])
        return address

    def _key_in_file(self) -> list[str]:
        if not self._server_key_file:
            return []
        try:
            return [read_public_key(self._server_key_file)]
        except SettingsError as error:
            sys.stderr.write(f"warning: {error}: its key is not tried\n")
            return []

    def answered(self, endpoint: str) -> None:
        """The last try had the right key: the next one begins with it."""
        if endpoint in self._last:
            self._next[endpoint] = self._last[endpoint]


def dialer_of(security: SecuritySettings | None) -> Dialer | None:
    """The dialer that these settings ask for; None without keys.

    Raises:
        SettingsError: the key file cannot be used.
    """
    if security is None or not security.key_file:
        return None
    pair = read_key_pair(security.key_file)
    return Dialer(pair, security.server_keys, security.server_key_file)
