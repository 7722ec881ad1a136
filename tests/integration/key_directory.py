"""Keys for a test: pairs in files, and the allow-list that lets them in."""

from pathlib import Path

import msgspec

from rolloutbus.bus.security.key_files import edit_allow_list, write_key_pair
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.principals import Principal, Role
from rolloutbus.bus.security.zmq_curve import new_key_pair


class KeyDirectory:
    """A directory of keys and its allow-list."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.allow_list = directory / "allow.json"
        edit_allow_list(self.allow_list, lambda known: known)

    def file(self, name: str) -> Path:
        return self.directory / f"{name}.key"

    def make_unlisted(self, name: str) -> str:
        """Make a key that is not on the allow-list; returns its public half."""
        pair = new_key_pair(name)
        write_key_pair(self.file(name), pair)
        return pair.public

    def add(self, name: str, role: Role) -> str:
        """Make a key and put it on the allow-list."""
        public = self.make_unlisted(name)
        self.allow(name, public, role)
        return public

    def allow(self, name: str, public: str, role: Role) -> None:
        """Put an existing key on the allow-list."""
        edit_allow_list(self.allow_list, lambda known: [*known, Principal(public, name, role)])

    def revoke(self, name: str) -> None:
        edit_allow_list(self.allow_list, lambda known: [p for p in known if p.name != name])

    def change_role(self, name: str, role: Role) -> None:
        def changed(known: list[Principal]) -> list[Principal]:
            return [msgspec.structs.replace(p, role=role) if p.name == name else p for p in known]

        edit_allow_list(self.allow_list, changed)

    def client_settings(self, name: str, *server_keys: str) -> SecuritySettings:
        """Settings of a peer that connects."""
        return SecuritySettings(key_file=str(self.file(name)), server_keys=list(server_keys))

    def server_settings(self, name: str, *server_keys: str) -> SecuritySettings:
        """Settings of a peer that listens, and may connect, too."""
        return SecuritySettings(
            key_file=str(self.file(name)),
            server_keys=list(server_keys),
            allow_list=str(self.allow_list),
        )
