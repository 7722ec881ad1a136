"""Journals made by hand: a core and its files, without a clock, a thread or a process."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.replay.journal.core import (
    Begin,
    Effect,
    JournalCore,
    JournalIdentity,
    JournalSettings,
    Write,
)
from rolloutbus.replay.journal.files import JournalSegment, pack
from rolloutbus.replay.journal.records import Record, Stream

WALL_NS = 1_700_000_000_000_000_000
MS = 1_000_000
S = 1_000 * MS


class Salts:
    """They differ, and are the same in each run."""

    def __init__(self, n: int = 0) -> None:
        self._n = n

    def __call__(self, size: int) -> bytes:
        self._n += 1
        return self._n.to_bytes(size, "big")


class Desk:
    """Carries out what a core wants, at once."""

    def __init__(
        self,
        directory: Path,
        settings: JournalSettings | None = None,
        *,
        packs: bool = False,
        salts: Salts | None = None,
    ) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.directory = directory
        identity = JournalIdentity("j" * 32)
        self.core = JournalCore(settings or JournalSettings(), identity, salts or Salts())
        self._file = JournalSegment(directory)
        self._packs = packs
        self.now_ns = S
        self.carry_out(self.core.start(self.now_ns, WALL_NS))

    def add(self, *rids: str, topic: bytes = b"") -> None:
        """One published message per rid; `topic` makes it as large as wanted."""
        for rid in rids:
            self.append(Stream, topic, [Entry("idle", rid)])

    def append(self, kind: Callable[..., Record], *fields: object) -> None:
        """Any record, of its fields after the number and the time."""
        self.core.append(lambda seq: kind(seq, self.now_ns, *fields), self.now_ns)

    def flush(self) -> None:
        """Time passes until what waits is due."""
        self.now_ns += 60 * MS
        self.carry_out(self.core.due(self.now_ns, WALL_NS))

    def close(self) -> None:
        self.carry_out(self.core.close(self.now_ns))

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Begin(segment):
                    self._file.begin(segment)
                case Write(content):
                    self._file.write(content)
                case _:
                    self._file.close()
                    if self._packs:
                        pack(self.directory, effect.segment)
        self.core.synced()


def segment(number: int, *, is_packed: bool = False) -> str:
    """Name of a file."""
    return f"{number:06d}.{'rbz' if is_packed else 'rbj'}"
