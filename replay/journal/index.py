"""Where in a packed segment the records of a request, a session, a version or a time are.

Spec: docs/journal.md, "Index".
"""

from typing import cast

import msgspec

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.commands import COMMANDS, with_trait
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.delivery import Accepted, Ack, Fenced, Lost, Queued
from rolloutbus.bus.wire.messages.stream import Deltas, Idle
from rolloutbus.bus.wire.messages.weights import PublishVersion
from rolloutbus.replay.journal.records import End, Record, Stream, Tap, Unknown

_OF_VERSIONS = {"update_progress"} | {
    kind for kind in with_trait("versioned") if "version" in COMMANDS[kind].body.__struct_fields__
}
_OF_ITEMS = {"accepted", "ack", "lost", "fenced"}


class RunMark(msgspec.Struct, frozen=True, array_like=True):
    """One run of records."""

    offset: int
    """Of its record in the file."""
    seq: int
    at_ns: int


class SegmentIndex(msgspec.Struct, forbid_unknown_fields=True):
    """Of one segment. Lists hold positions in `runs`, ascending."""

    segment: int
    runs: list[RunMark]
    requests: dict[str, list[int]]
    sessions: dict[str, list[str]]
    """Session -> its requests."""
    versions: dict[int, list[int]]
    next_seq: int = 0
    """Number that follows the segment's last record; 0: it is not known."""

    def runs_of(self, *, rid: str = "", version: int = -1) -> set[int]:
        """Positions of the runs in which either occurs."""
        return {*self.requests.get(rid, []), *self.versions.get(version, [])}


class IndexBuilder:
    """Makes the index of a segment, run by run."""

    def __init__(self, segment: int) -> None:
        self.index = SegmentIndex(segment, [], {}, {}, {})

    def run(self, offset: int, first: Record | Unknown) -> None:
        """The records that come next are in the run at this offset."""
        self.index.runs.append(RunMark(offset, first.seq, first.at_ns))

    def add(self, record: Record | Unknown) -> None:
        """One more record of the present run, or the end of the segment."""
        if isinstance(record, End):
            self.index.next_seq = record.seq + 1
        if not isinstance(record, Tap | Stream):
            return
        for entry in record.entries:
            rids, versions = named_in(entry)
            for rid in rids:
                self._note(self.index.requests.setdefault(rid, []))
            for version in versions:
                self._note(self.index.versions.setdefault(version, []))
            if entry.place is not None and entry.place.session:
                rids_of = self.index.sessions.setdefault(entry.place.session, [])
                if entry.rid not in rids_of:
                    rids_of.append(entry.rid)

    def _note(self, runs: list[int]) -> None:
        run = len(self.index.runs) - 1
        if not runs or runs[-1] != run:
            runs.append(run)


def named_in(entry: Entry) -> tuple[set[str], set[int]]:
    """The requests and the weight versions that an entry speaks of; garbage speaks of none."""
    rids = {entry.rid.partition("@")[0]} if entry.rid else set[str]()
    versions = set[int]()
    try:
        if entry.kind == "deltas":
            deltas = cast("Deltas", unpack(entry))
            rids.update(deltas.rids)
            versions.update(deltas.versions)
        elif entry.kind == "idle":
            rids.update(cast("Idle", unpack(entry)).rids)
        elif entry.kind == "queued":
            rids.update(cast("Queued", unpack(entry)).rids)
        elif entry.kind in _OF_ITEMS:
            items = cast("Accepted | Ack | Lost | Fenced", unpack(entry)).items
            rids.update(rid.partition("@")[0] for rid, _ in items)
        elif entry.kind in _OF_VERSIONS:
            versions.add(cast("PublishVersion", unpack(entry)).version)  # they all have one
    except RemoteProtocolError:
        pass
    return rids, versions
