"""What workers tell of the prefixes that their engines have cached.

Spec: docs/protocol.md, "Prefix affinity".
"""

import msgspec

from rolloutbus.bus.wire.limits import MarkNews, Natural


class Prefixes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a cache holds now that it did not hold when the one before was said, and the reverse."""

    seq: Natural
    """Grows by one; at 0 the receiver forgets what was said before."""
    added: MarkNews = b""
    """Marks, uint64 [k] little endian: beginnings of prompts that are cached now."""
    removed: MarkNews = b""
    """Of those that are not any more."""
