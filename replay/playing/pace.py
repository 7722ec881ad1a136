"""When each record was made, counted from the first, while somebody recorded.

Pure. Spec: docs/journal.md, "Playing".
"""

from rolloutbus.replay.journal.records import End, Record, Unknown

_S = 1e-9


class Pace:
    """Follows the recorder's clock through a journal."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._elapsed_ns = 0

    def at_s(self, record: Record | Unknown) -> float:
        """Seconds from the beginning of the recording to this record, the next one."""
        if self._last_ns is not None:
            # A clock that begins again is that of a machine that was started again.
            self._elapsed_ns += max(0, record.at_ns - self._last_ns)
        self._last_ns = record.at_ns
        if isinstance(record, End) and record.reason != "rotated":
            self._last_ns = None  # nobody recorded from here until the next head
        return self._elapsed_ns * _S
