"""How an actor with keys connects: as itself, to the holder of a key that it expects."""

from collections.abc import Sequence

import zmq

from bus.endpoints import split_key
from bus.errors import SettingsError
from bus.security.key_files import read_key_pair
from bus.security.keys import KeyPair
from bus.security.settings import SecuritySettings
from bus.security.zmq_curve import dress_client


class Dialer:
    """Puts keys on sockets that connect. An endpoint's own key goes before the list."""

    def __init__(self, pair: KeyPair, server_keys: Sequence[str] = ()) -> None:
        """`server_keys`: what an endpoint without a key may prove to hold: one of these."""
        self._pair = pair
        self._server_keys = list(server_keys)
        self._next: dict[str, int] = {}
        """Endpoint with a choice of keys -> which one to try next."""
        self._last: dict[str, int] = {}

    @property
    def name(self) -> str:
        """Whose key it is."""
        return self._pair.name

    def dress(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Before a socket connects; returns the bare address.

        A router that changes its key has two meanwhile: each try after one that was not
        `answered` takes the next.

        Raises:
            SettingsError: nobody said whose key to expect there.
        """
        address, key = split_key(endpoint)
        keys = [*([key] if key else []), *(k for k in self._server_keys if k != key)]
        if not keys:
            raise SettingsError(f"{address}: nobody said which key to expect there")
        turn = self._next.get(endpoint, 0)
        if len(keys) > 1:
            self._last[endpoint], self._next[endpoint] = turn, turn + 1
        dress_client(socket, self._pair, keys[turn % len(keys)])
        return address

    def answered(self, endpoint: str) -> None:
        """The last try had the right key: the next one begins with it."""
        if endpoint in self._last:
            self._next[endpoint] = self._last[endpoint]


def dialer_of(security: SecuritySettings | None) -> Dialer | None:
    """What these settings connect with; None without keys.

    Raises:
        SettingsError: the key file cannot be used.
    """
    if security is None or not security.key_file:
        return None
    return Dialer(read_key_pair(security.key_file), security.server_keys)
