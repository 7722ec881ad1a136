"""How much a subscriber holds, and when it counts as slow."""

import msgspec

from rolloutbus.bus.wire.errors import SettingsError

MIB = 1 << 20


class SubscriberSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes are of tokens and logprobs, 8 per token, and 1 KiB for each stream."""

    waiting_bytes: int = 8 * MIB
    """More than this waits for the reader: it is told results only."""
    unread_messages: int = 9_900
    """So many messages were read from the socket without a pause: the same. A socket holds a few
    more of each publisher before that drops what comes."""
    held_bytes: int = 512 * MIB
    """Of all streams; beyond, the oldest are let go."""
    is_restored: bool = True
    """Tokens are told again once the reader has taken all that waited; else when it asks."""
    repairs_at_once: int = 16
    """More gaps wait for their turn: repairs pass through the router."""

    def __post_init__(self) -> None:
        if min(self.waiting_bytes, self.unread_messages, self.repairs_at_once) < 1:
            raise SettingsError("bounds of a subscriber must be at least 1")
        if self.held_bytes < self.waiting_bytes:
            raise SettingsError("held_bytes must be at least waiting_bytes")
