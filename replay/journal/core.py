"""What a journal writes, and when: records in, bytes and syncs out; no file of its own.

One write is under way at a time; what comes meanwhile waits, within bounds, and leaves together.
Spec: docs/journal.md, "Durability".
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.journal.format import FORMAT, Framer
from rolloutbus.replay.journal.records import (
    SALT_BYTES,
    End,
    EndReason,
    Head,
    LostRecord,
    Record,
    payload_of,
)

MIB = 1024 * 1024


class JournalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in seconds, sizes in bytes."""

    sync_s: float = 0.05
    """Longest time from a record's arrival until it is durable, if the disk keeps up."""
    sync_bytes: int = MIB
    """When so many bytes wait, they are written immediately, without waiting for `sync_s`."""
    segment_bytes: int = 64 * MIB
    segment_s: float = 600.0
    """Age at which a segment ends; `segment_bytes` is the size at which it ends."""
    memory_bytes: int = 64 * MIB
    """Bytes that may wait for a slow disk; later records are lost, and the journal says so."""
    keep_bytes: int = 0
    """Bytes of closed segments to keep; older ones are deleted; 0: all are kept."""
    keep_s: float = 0.0
    """Age up to which closed segments are kept; 0: all are kept."""

    def __post_init__(self) -> None:
        if self.sync_s <= 0 or self.segment_s <= 0 or self.keep_s < 0 or self.keep_bytes < 0:
            raise SettingsError("a journal's times are above 0, and what it keeps at least 0")
        if min(self.sync_bytes, self.segment_bytes, self.memory_bytes) < 1:
            raise SettingsError("a journal's sizes are at least 1 byte")


NO_ATTEMPT = (0, 0)
_NS = 1_000_000_000


class Begin(msgspec.Struct, frozen=True):
    """Make the file of this segment, and its name durable."""

    segment: int


class Write(msgspec.Struct, frozen=True):
    """Append to the segment and sync it; then say `synced`."""

    content: bytes


class FinishSegment(msgspec.Struct, frozen=True):
    """Nothing more comes to this segment: close and pack it."""

    segment: int


Effect = Begin | Write | FinishSegment


@dataclass(frozen=True, slots=True)
class JournalIdentity:
    """What every segment says of its journal."""

    journal: str
    """Random hex name."""
    host: str = ""
    filter: str = ""


class JournalCore:
    """The writer of one journal. All times are nanoseconds of CLOCK_BOOTTIME."""

    def __init__(
        self,
        settings: JournalSettings,
        identity: JournalIdentity,
        make_salt: Callable[[int], bytes],
        *,
        first_seq: int = 0,
        first_segment: int = 1,
    ) -> None:
        """`make_salt` gives so many random bytes."""
        self._settings = settings
        self._identity = identity
        self._make_salt = make_salt
        self._segment = first_segment - 1
        self._framer: Framer | None = None
        self.next_seq = first_seq
        """Number of the record that comes next."""
        self.durable = first_seq - 1
        """All records up to this number survive; -1: none yet."""
        self.n_dropped = 0
        """Messages that had no room in memory."""
        self.problem = ""
        """Why nothing is written any more; empty while all is well."""
        self._n_unsaid = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._waiting_since = 0
        self._in_flight_bytes = 0
        self._in_flight_seq: int | None = None
        self._segment_bytes = 0
        self._segment_first = first_seq
        self._segment_began = 0

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way."""
        return self._in_flight_seq is not None

    @property
    def waiting_bytes(self) -> int:
        """Bytes in memory that are not written yet."""
        return self._waiting_bytes + self._in_flight_bytes

    def start(self, now_ns: int, wall_ns: int) -> list[Effect]:
        """Begin the first segment."""
        self._begin(now_ns, wall_ns)
        return self._flush([Begin(self._segment)])

    def append(self, build: Callable[[int], Record], now_ns: int) -> bool:
        """Take the record that `build` makes of its number; False if there is no room for it."""
        if self.problem:
            return False
        if self.waiting_bytes >= self._settings.memory_bytes:
            self.n_dropped += 1
            self._n_unsaid += 1
            return False
        self._put_lost(now_ns)
        self._put(build, now_ns)
        return True

    def due(self, now_ns: int, wall_ns: int) -> list[Effect]:
        """Returns what to write now; nothing while a write is under way."""
        if self.is_busy or self.problem:
            return []
        settings = self._settings
        is_large = self._segment_bytes >= settings.segment_bytes
        if is_large or now_ns - self._segment_began >= settings.segment_s * _NS:
            return self._rotate(now_ns, wall_ns)
        is_late = now_ns - self._waiting_since >= settings.sync_s * _NS
        if self._waiting and (is_late or self._waiting_bytes >= settings.sync_bytes):
            return self._flush([])
        return []

    def due_in_s(self, now_ns: int) -> float:
        """Seconds until `due` may want something; 0: at once."""
        if self._waiting_bytes >= self._settings.sync_bytes:
            return 0.0
        end_s = (self._segment_began - now_ns) / _NS + self._settings.segment_s
        if not self._waiting:
            return max(end_s, 0.0)
        return max(min(end_s, (self._waiting_since - now_ns) / _NS + self._settings.sync_s), 0.0)

    def synced(self) -> None:
        """The write under way is durable."""
        if self._in_flight_seq is not None:
            self.durable = self._in_flight_seq
        self._in_flight_seq, self._in_flight_bytes = None, 0

    def failed(self, why: str) -> None:
        """The write under way failed: after a hole nothing may follow, so this is the end."""
        self.problem = why
        self._in_flight_seq, self._in_flight_bytes = None, 0
        self._waiting.clear()
        self._waiting_bytes = 0

    def close(self, now_ns: int) -> list[Effect]:
        """Write what waits, and the end; only when no write is under way."""
        if self.problem or self._framer is None:
            return []
        self._put_lost(now_ns)
        self._end("closed", now_ns)
        return [*self._flush([]), FinishSegment(self._segment)]

    def _rotate(self, now_ns: int, wall_ns: int) -> list[Effect]:
        old = self._segment
        self._end("rotated", now_ns)
        before = self._flush([])
        self._begin(now_ns, wall_ns)
        return [*before, FinishSegment(old), Begin(self._segment), *self._flush([])]

    def _begin(self, now_ns: int, wall_ns: int) -> None:
        self._segment += 1
        self._framer = Framer(self._make_salt(SALT_BYTES))
        self._segment_bytes, self._segment_began = 0, now_ns
        self._segment_first = self.next_seq
        self._wait(self._framer.header, now_ns)
        who, segment, salt = self._identity, self._segment, self._framer.salt
        self._put(
            lambda seq: Head(
                seq, now_ns, who.journal, segment, FORMAT, salt, wall_ns, who.host, who.filter
            ),
            now_ns,
        )

    def _end(self, reason: EndReason, now_ns: int) -> None:
        n_records = self.next_seq - self._segment_first
        self._put(lambda seq: End(seq, now_ns, reason, n_records), now_ns)

    def _put_lost(self, now_ns: int) -> None:
        n_lost, self._n_unsaid = self._n_unsaid, 0
        if n_lost:
            self._put(
                lambda seq: LostRecord(seq, now_ns, "memory", "", NO_ATTEMPT, 0, n_lost), now_ns
            )

    def _put(self, build: Callable[[int], Record], now_ns: int) -> None:
        assert self._framer is not None
        framed = self._framer.frame(payload_of(build(self.next_seq)))
        self.next_seq += 1
        self._wait(framed, now_ns)

    def _wait(self, content: bytes, now_ns: int) -> None:
        if not self._waiting:
            self._waiting_since = now_ns
        self._waiting.append(content)
        self._waiting_bytes += len(content)
        self._segment_bytes += len(content)

    def _flush(self, effects: list[Effect]) -> list[Effect]:
        content = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._in_flight_bytes += len(content)
        self._in_flight_seq = self.next_seq - 1
        return [*effects, Write(content)]
