"""The keys of a local fleet: one file per actor in one directory, made when they are missing."""

from collections.abc import Sequence
from pathlib import Path

from rolloutbus.bus.security.allow_list import edit_allow_list
from rolloutbus.bus.security.key_files import (
    public_file,
    read_key_pair,
    write_key_pair,
    write_public_key,
)
from rolloutbus.bus.security.keys import KeyPair
from rolloutbus.bus.security.principals import Principal, Role
from rolloutbus.bus.security.settings import SecuritySettings
from rolloutbus.bus.security.zmq_curve import new_key_pair
from rolloutbus.bus.transport.ipc_paths import private_dir
from rolloutbus.bus.wire.errors import SettingsError

ALLOW_LIST = "allow.json"
ROUTER = "router"
OPERATOR = "operator"
"""The key that the commands of `rolloutbus` use, and clients that have none of their own."""


class FleetKeys:
    """A directory of mode 0700 with a key file for each actor, and the allow-list."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    @property
    def operator(self) -> Path:
        """Key file of an admin."""
        return self._file(OPERATOR)

    def make(self, members: dict[str, Role]) -> None:
        """Make what is missing, for these actors of the fleet, its router and its operator.

        An allow-list that is there already is only added to: who was revoked, and still has a key
        file, does not come back.

        Raises:
            SettingsError: the directory cannot be written, or holds something else.
        """
        try:
            private_dir(self._directory)
        except OSError as error:
            raise SettingsError(f"cannot use {self._directory}: {error.strerror}") from error
        path = self._directory / ALLOW_LIST
        is_new_list = not path.exists()
        _, router = self._pair(ROUTER)
        write_public_key(self._router_pub, router.public)
        everybody: dict[str, Role] = {**members, OPERATOR: "admin"}
        added: list[Principal] = []
        for name, role in everybody.items():
            is_new_key, pair = self._pair(name)
            if is_new_key or is_new_list:
                added.append(Principal(pair.public, name, role))

        def add(known: Sequence[Principal]) -> list[Principal]:
            return [*known, *added]

        if added:
            edit_allow_list(path, add)

    def security_of(self, name: str) -> SecuritySettings:
        """What an actor of this fleet is told."""
        return SecuritySettings(
            key_file=str(self._file(name)),
            server_key_file=str(self._router_pub),
            allow_list=str(self._directory / ALLOW_LIST),
        )

    @property
    def _router_pub(self) -> Path:
        return public_file(self._file(ROUTER))

    def _pair(self, name: str) -> tuple[bool, KeyPair]:
        """(whether it had to be made, the pair)."""
        file = self._file(name)
        if file.exists():
            return False, read_key_pair(file)
        pair = new_key_pair(name)
        write_key_pair(file, pair)
        return True, pair

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.key"
