"""What a store holds: its ledger, segments and files, taken over from the store before it.

A store that crashed left its sealed segments in shared memory; its successor on the same
directory adopts them, so that late workers can still catch up. They keep their names, so that a
successor which dies before it could write anything down loses none. After a restart of the whole
machine shared memory is empty, and the last committed version of each policy is read back from its
files.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.weights.shm import SHM_DIR, SegmentGone
from rolloutbus.bus.weights.side_by_side import first_mismatch
from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.bus.wire.messages.weights import Offer, ReserveVersion, RestoreVersion, SealVersion
from rolloutbus.trainer_adapter.store.files import WeightFiles, place_of
from rolloutbus.trainer_adapter.store.ledger import LEDGER_FILE, Ledger
from rolloutbus.trainer_adapter.store.segments import SegmentPool, StoreFull, sweep
from rolloutbus.trainer_adapter.store.versions import (
    Opened,
    Record,
    Retired,
    StoredVersion,
    VersionKey,
    VersionTable,
)

_LINE_BYTES = 4096
"""Of all that a record has beside its tensors."""
_DIGEST_BYTES = 32
"""More, of each tensor, once its bytes are known."""


class StoreContents:
    """The ledger, the segments and the versions in them, consistent with one another."""

    def __init__(self, directory: Path, shm_dir: Path = SHM_DIR, disk: str = "") -> None:
        """Take over what is there; `disk` is where versions are kept as files, if at all.

        Raises:
            SettingsError: another store uses the directory, or its ledger is damaged.
            LedgerUnsure: it is not known what a power cut would leave of the ledger.
        """
        self.ledger = Ledger(directory / LEDGER_FILE)
        self.table = VersionTable()
        former_owners: list[str] = []
        retired: list[VersionKey] = []
        self.table.restore(_noting(self.ledger.read(), former_owners, retired))
        self.pool = SegmentPool(shm_dir, former_owners[-1] if former_owners else "")
        self._dropped: list[VersionKey] = []
        """Versions of the ledger whose bytes are gone."""
        self._unread: list[Record] = []
        """The last committed version of a policy, where it cannot be had now: a later store may."""
        self.files = WeightFiles(Path(disk), self.pool.owner) if disk else None
        if self.files is not None:
            self._tidy(self.files, former_owners, retired)
        self._adopt_all()
        self.pool.drop_others()
        self.trouble = ""
        """Why nothing can be written to the ledger; empty: it can."""
        self._taken_over: list[Record] = [
            Opened(self.pool.owner),
            *self._unread,
            *self.table.snapshot(),
        ]
        """Records of the takeover that are not in the ledger yet."""
        try:
            self._record()
        except OSError as error:
            self._note_trouble(error)
        sweep(shm_dir)

    def make_room(self, size_bytes: int = 0) -> None:
        """Be sure that so many bytes of records can be written down, before they are decided on.

        Raises:
            OSError: the disk is full; `trouble` says so until this succeeds.
            LedgerUnsure: it is not known what a power cut would leave of the ledger.
        """
        try:
            self._record()
            self.ledger.make_room(size_bytes)
        except OSError as error:
            self._note_trouble(error)
            raise
        if self.trouble:
            self.trouble = ""
            warn("there is room for the record of weight versions again: they can be published")

    def shorten(self) -> None:
        """Leave out of a long ledger what became of no meaning, as the next store would.

        Made of what is written down, not of the table, which may be ahead of that: records that
        are appended later mean the same after it.

        Raises:
            LedgerUnsure: it is not known what a power cut would leave of the ledger.
        """
        if self._taken_over or not self.ledger.is_long:
            return
        owners: list[str] = []
        retired: list[VersionKey] = []
        table = VersionTable()
        try:
            table.restore(_noting(self.ledger.read(), owners, retired))
            # Their files may still be there: the next store deletes them.
            gone = retired if self.files is not None else []
            kept = [*map(Opened, owners), *(Retired(*key) for key in gone), *table.snapshot()]
            self.ledger.rewrite(kept)
        except (OSError, SettingsError) as error:
            self.ledger.put_off()
            warn(f"{self.ledger.path} stays as long as it is: {error}")

    def record_bytes(self, command: msgspec.Struct) -> int:
        """At least the size of what a command has written down."""
        tensors = command.tensors if isinstance(command, ReserveVersion) else []
        if isinstance(command, SealVersion | RestoreVersion):
            stored = self.table.by_key.get((command.policy, command.version))
            tensors = stored.tensors if stored is not None else []
        return _LINE_BYTES + len(msgspec.json.encode(tensors)) + _DIGEST_BYTES * len(tensors)

    def _record(self) -> None:
        """Write down what was taken over, unless that has been done."""
        if not self._taken_over:
            return
        try:
            self.ledger.rewrite(self._taken_over)
        except OSError:
            # No room for another file; in this one some may be left.
            gone = [Retired(*key) for key in self._dropped]
            self.ledger.append(*self._taken_over, *gone)
        self._taken_over = []

    def _note_trouble(self, error: OSError) -> None:
        reason = f"{self.ledger.path}: {error.strerror}"
        if reason != self.trouble:
            self.trouble = reason
            warn(f"weight versions cannot be written down, so none is published: {reason}")

    def close(self) -> None:
        """Give all shared memory back: the versions are gone, their numbers stay taken."""
        self.pool.close()
        self.ledger.close()

    def leave(self) -> None:
        """Let go of everything after an error: the next store finds the versions in memory."""
        self.pool.leave()
        self.ledger.close()

    def _adopt_all(self) -> None:
        """A segment may hold several versions: it is adopted once, and dropped with the last."""
        by_segment: dict[str, list[StoredVersion]] = {}
        for stored in self.table.pullable():
            by_segment.setdefault(stored.segment, []).append(stored)
        for segment, sharing in by_segment.items():
            if self._is_adopted(segment, sharing[0]):
                continue
            for stored in sharing:
                if found := self._read_back(stored):
                    stored.segment = found
                else:
                    self._drop(stored)

    def _is_adopted(self, segment: str, stored: StoredVersion) -> bool:
        """Whether the segment is there, and now this store's; not if it or its bytes are gone."""
        try:
            self.pool.adopt(segment, stored.size_bytes)
        except SegmentGone:
            return False
        if first_mismatch(self.pool.content(segment), stored.tensors) is not None:
            self.pool.retire(segment, is_reusable=False)
            return False
        return True

    def _read_back(self, stored: StoredVersion) -> str:
        """A new segment with the last committed version's files; empty if it cannot be had."""
        if self.files is None or not self._is_last(stored.key) or not self.files.has(stored.key):
            return ""
        try:
            segment = self.pool.take(stored.size_bytes)
        except StoreFull as error:
            warn(f"version {stored.number} stays on disk: {error}")
            return ""
        try:
            content = self.pool.content(segment)
            self.files.read(stored.key, stored.tensors, content)
            wrong = first_mismatch(content, stored.tensors)
            why = f"tensor {wrong.name!r} is damaged" if wrong is not None else ""
        except (BusError, OSError) as error:
            why = str(error)
        if why:
            warn(f"version {stored.number} of {stored.policy!r} cannot be read back: {why}")
            self.pool.retire(segment, is_reusable=False)
            return ""
        self.pool.freeze(segment)
        return segment

    def _drop(self, stored: StoredVersion) -> None:
        """Offer it no more; the version in use stays in the ledger, and its files where they are.

        They may be damaged, which is left to a person, or there is no room, or no disk, just now.
        """
        del self.table.by_key[stored.key]
        if self._is_last(stored.key):
            if self.files is not None and not self.files.has(stored.key):
                warn(
                    f"version {stored.number} of {stored.policy!r} is committed, but in neither "
                    f"{self.files.root} nor shared memory: workers get no weights until another "
                    "version is published, or a store starts that finds its files"
                )
            self._unread.append(stored.sealed())
            return
        self._dropped.append(stored.key)
        if self.files is not None:
            self.files.remove(stored.key)

    def _is_last(self, key: VersionKey) -> bool:
        """Whether no later version of its policy is committed."""
        policy, version = key
        return self.table.committed.get(policy) == version

    def _tidy(
        self, files: WeightFiles, former_owners: list[str], retired: list[VersionKey]
    ) -> None:
        """Delete what earlier processes left behind; offer what they wrote."""
        files.sweep(former_owners)
        for key in retired:
            if not self._is_last(key):
                files.remove(key)
        for key in files.taken():
            # Whatever the ledger knows: its directory would be in the way.
            self.table.take_number(*key)
        for stored in self.table.pullable():
            if files.has(stored.key):
                stored.offers.append(Offer("disk", at=place_of(stored.key)))


def _noting(
    records: Iterator[Record], owners: list[str], retired: list[VersionKey]
) -> Iterator[Record]:
    """Pass records on, and add to the lists what is wanted of them beside the table."""
    for record in records:
        match record:
            case Opened(owner):
                owners.append(owner)
            case Retired(policy, version):
                retired.append((policy, version))
            case _:
                pass
        yield record
