"""CURVE keys as values: 64 hexadecimal digits, of which the secret half never shows itself."""

import re

from rolloutbus.bus.wire.errors import SettingsError

KEY_BYTES = 32
_HEX_KEY = re.compile(r"[0-9a-f]{64}")


class KeyPair:
    """What one actor is known by, and what proves it."""

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
