"""Settings of a recorder that is a process of its own."""

import msgspec


class RecorderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which fleet to record, and where."""

    router: str
    """Endpoint of its router for clients, or several, separated by commas."""
    directory: str
    """Of the journal; the one that is there goes on."""
    key_file: str = ""
    """Of an admin or a subscriber; empty: the router asks for no keys."""
    exit_with_parent: bool = False
    """Leave when the process that started this one dies."""
