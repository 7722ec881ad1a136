"""How a journal is written: when it is synced, when a segment ends, what is kept."""

import msgspec

from rolloutbus.bus.wire.errors import SettingsError

MIB = 1024 * 1024


class JournalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in seconds, sizes in bytes."""

    sync_s: float = 0.05
    """What came is durable at the latest so much later, if the disk keeps up."""
    sync_bytes: int = MIB
    """So much is written and synced at once, without waiting."""
    segment_bytes: int = 64 * MIB
    segment_s: float = 600.0
    """A segment ends when it is so large, or so old."""
    memory_bytes: int = 64 * MIB
    """Waits for a slow disk; what comes beyond is lost, and said to be."""
    keep_bytes: int = 0
    """Closed segments beyond are deleted, oldest first; 0: all are kept."""
    keep_s: float = 0.0
    """Closed segments older than that are deleted; 0: all are kept."""

    def __post_init__(self) -> None:
        if self.sync_s <= 0 or self.segment_s <= 0 or self.keep_s < 0 or self.keep_bytes < 0:
            raise SettingsError("a journal's times are above 0, and what it keeps at least 0")
        if min(self.sync_bytes, self.segment_bytes, self.memory_bytes) < 1:
            raise SettingsError("a journal's sizes are at least 1 byte")
