"""Address and key of a fleet as one value, for programs on other machines."""

import functools
from pathlib import Path

import msgspec

from rolloutbus.bus.security.key_files import in_memory
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.client.client import ConnectOptions


class Ticket(msgspec.Struct, frozen=True):
    """All that a client of a fleet needs, wherever it runs; it pickles, and holds a secret.

    Who has it may do with the fleet what its key may do: `fleet.ticket` has an admin's.
    """

    address: str
    """Where clients connect, with the router's public key."""
    key: bytes = b""
    """Content of a key file; empty: the fleet asks for none."""

    @classmethod
    def of(cls, address: str, key_file: str) -> "Ticket":
        """The ticket for an address, with the key in a file of this machine.

        Raises:
            SettingsError: the address is a socket in a directory of this machine.
        """
        if "ipc:" in address:
            raise SettingsError(
                f"ticket: {address} is a socket of this machine, where the address is enough; to "
                "be reached from other machines a fleet is started with secure=…, or on Ray"
            )
        return cls(address, Path(key_file).read_bytes() if key_file else b"")

    def connect_options(self) -> ConnectOptions:
        """Arguments of `connect` and `connect_sync` in this process: the key is in its memory."""
        key_file = _in_memory(self.key) if self.key else ""
        return {"address": self.address, "key_file": key_file, "fleet": ""}

    def __repr__(self) -> str:
        return f"Ticket({self.address!r})"


@functools.cache
def _in_memory(key: bytes) -> str:
    """Where the key is; once for each key, since a descriptor is used up."""
    return in_memory(key)
