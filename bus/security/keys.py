"""CURVE keys as values of 64 hexadecimal digits, and the settings that name them."""

import re

import msgspec

from rolloutbus.bus.wire.errors import SettingsError

KEY_BYTES = 32
_HEX_KEY = re.compile(r"[0-9a-f]{64}")


class KeyPair:
    """The public key that an actor is known by, and the secret that proves it."""

    __slots__ = ("_secret", "name", "public")

    def __init__(self, name: str, public: str, secret: bytes) -> None:
        self.name = name
        """Whose it is; by default the actor's name on the bus, or the start of it."""
        self.public = public
        """64 hexadecimal digits."""
        self._secret = secret

    def reveal(self) -> bytes:
        """The 32 secret bytes, for a socket option or a file of mode 0600 and nothing else."""
        return self._secret

    def __repr__(self) -> str:
        return f"KeyPair({self.name!r}, {self.public!r})"


def check_public_key(text: str) -> str:
    """The key itself, if it has the form of one.

    Raises:
        SettingsError: it has not; the text is not repeated, since it may be a secret.
    """
    if not is_public_key(text):
        raise SettingsError("a public key has 64 hexadecimal digits in lower case")
    return text


def is_public_key(text: str) -> bool:
    """Whether this has the form of a public key."""
    return _HEX_KEY.fullmatch(text) is not None


class SecuritySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths and public keys only: a secret never stands in settings."""

    key_file: str = ""
    """This actor's own key pair, mode 0600; see `rolloutbus keys new`."""
    server_keys: list[str] = []
    """Public keys that the router may have; two while it changes its own. Not needed where the
    address carries the key (`tcp://HOST:PORT#KEY`)."""
    server_key_file: str = ""
    """Holds the public key that the router has, or is about to have, as `keys rotate` leaves it;
    read again for every connection, so that a router may change its key while this actor runs."""
    allow_list: str = ""
    """Who may connect to the sockets that this actor binds; needed by router, store and workers."""
    unsafe_no_auth: bool = False
    """For tests: allows addresses beyond this machine without keys, except for a router's."""

    def __post_init__(self) -> None:
        for key in self.server_keys:
            check_public_key(key)
