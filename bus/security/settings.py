"""Which keys an actor has and whom it lets in; part of the settings of every role."""

import msgspec

from rolloutbus.bus.security.keys import check_public_key


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
