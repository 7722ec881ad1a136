"""Finding what a journal says of one request, one session, one weight version or one time.

Packed segments are read only where their index says so. Spec: docs/journal.md, "Files".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rolloutbus.replay.journal.files import (
    content_of,
    index_again,
    read_index,
    records_of,
    segments_in,
)
from rolloutbus.replay.journal.format import Content, Found, framer_of, scan
from rolloutbus.replay.journal.index import named_in
from rolloutbus.replay.journal.records import Record, Stream, Tap, Unknown

ALWAYS = 2**63
ANY_VERSION = -1


@dataclass(frozen=True, slots=True)
class JournalQuery:
    """What to look for. Of several things, records that speak of any of them."""

    rids: frozenset[str] = frozenset()
    session: str = ""
    version: int = ANY_VERSION
    since_ns: int = 0
    """`at_ns` of the first record."""
    until_ns: int = ALWAYS

    @property
    def is_everything(self) -> bool:
        """Whether only the time decides."""
        return not self.rids and not self.session and self.version == ANY_VERSION

    def speaks(self, record: Record | Unknown) -> bool:
        """Whether a record is wanted."""
        if isinstance(record, Unknown) or not self.since_ns <= record.at_ns <= self.until_ns:
            return False
        if self.is_everything:
            return True
        if not isinstance(record, Tap | Stream):
            return False
        for entry in record.entries:
            rids, versions = named_in(entry)
            if not self.rids.isdisjoint(rids) or self.version in versions:
                return True
        return False


def find(directory: Path, wanted: JournalQuery) -> Iterator[Record]:
    """The records of a journal that are wanted, in order; what is damaged is left out."""
    if wanted.session:
        rids = wanted.rids | _rids_of(directory, wanted.session)
        wanted = JournalQuery(rids, "", wanted.version, wanted.since_ns, wanted.until_ns)
        if wanted.is_everything:
            return
    for file in segments_in(directory):
        content = content_of(file)
        if content is None:
            continue
        with content:
            for record in _of_segment(file.path, content, wanted):
                if wanted.speaks(record) and not isinstance(record, Unknown):
                    yield record


def _of_segment(path: Path, content: Content, wanted: JournalQuery) -> Iterator[Record | Unknown]:
    framer = framer_of(content)
    if framer is None:
        return
    if path.suffix != ".rbz" or wanted.is_everything:
        for found in scan(framer, content):
            if isinstance(found, Found):
                yield from records_of(framer, found.record)
        return
    index = read_index(path, framer) or index_again(path, framer, content)
    runs = {
        run for rid in wanted.rids or [""] for run in index.runs_of(rid=rid, version=wanted.version)
    }
    for run in sorted(runs):
        found = next(scan(framer, content, index.runs[run].offset), None)
        if isinstance(found, Found):
            yield from records_of(framer, found.record)


def _rids_of(directory: Path, session: str) -> frozenset[str]:
    found = set[str]()
    for file in segments_in(directory):
        content = content_of(file)
        if content is None:
            continue
        with content:
            framer = framer_of(content)
            if framer is None:
                continue
            index = read_index(file.path, framer) if file.is_packed else None
            index = index or index_again(file.path, framer, content)
            found.update(index.sessions.get(session, []))
    return frozenset(found)
