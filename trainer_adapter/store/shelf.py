"""What a store finds when it starts: its ledger read, its bytes taken over, leftovers swept.

A store that crashed left its sealed segments in shared memory; its successor on the same
directory adopts them, so that late workers can still catch up. After a restart of the whole machine
shared memory is empty, and the last committed version of each policy is read back from its files.
"""

from pathlib import Path

from bus.errors import BusError
from bus.host import SHM_DIR
from bus.manifest import first_mismatch
from bus.messages.weights import Offer
from bus.process import complain
from bus.shm import SegmentGone
from trainer_adapter.store.files import WeightFiles, place_of
from trainer_adapter.store.ledger import Ledger
from trainer_adapter.store.records import Opened, Retired
from trainer_adapter.store.segments import SegmentPool, StoreFull, sweep
from trainer_adapter.store.versions import StoredVersion, VersionTable


class Shelf:
    """The ledger, the segments and the versions in them, consistent with one another."""

    def __init__(self, directory: Path, shm_dir: Path = SHM_DIR, disk: str = "") -> None:
        """Take over what is there; `disk` is where versions are kept as files, if at all.

        Raises:
            SettingsError: another store uses the directory, or its ledger is damaged.
        """
        self.ledger = Ledger(directory / "versions.ledger")
        self.table = VersionTable()
        self.table.restore(self.ledger.records)
        self.pool = SegmentPool(shm_dir)
        self.files = WeightFiles(Path(disk), self.pool.owner) if disk else None
        predecessors = [each.owner for each in self.ledger.records if isinstance(each, Opened)]
        if self.files is not None:
            self._tidy(self.files, predecessors)
        self._adopt_all()
        self.ledger.rewrite([Opened(self.pool.owner), *self.table.snapshot()])
        sweep(shm_dir, dead_owners=frozenset(predecessors))

    def close(self) -> None:
        """Give all shared memory back: the versions are gone, their numbers stay taken."""
        self.pool.close()
        self.ledger.close()

    def _adopt_all(self) -> None:
        """A segment may hold several versions: it is renamed once, and dropped with the last."""
        by_segment: dict[str, list[StoredVersion]] = {}
        for stored in self.table.pullable():
            by_segment.setdefault(stored.segment, []).append(stored)
        for segment, sharing in by_segment.items():
            adopted = self._adopted(segment, sharing[0])
            for stored in sharing:
                stored.segment = adopted or self._read_back(stored)
                if not stored.segment:
                    self._drop(stored)

    def _adopted(self, segment: str, stored: StoredVersion) -> str:
        """The segment's new name; empty if it or its bytes are gone."""
        try:
            name = self.pool.adopt(segment, stored.size_bytes)
        except SegmentGone:
            return ""
        if first_mismatch(self.pool.content(name), stored.tensors) is not None:
            self.pool.retire(name, is_reusable=False)
            return ""
        return name

    def _read_back(self, stored: StoredVersion) -> str:
        """A new segment with the last committed version's files; empty if it cannot be had."""
        is_last = self.table.committed.get(stored.policy) == stored.number
        if self.files is None or not is_last or not self.files.has(stored.key):
            return ""
        try:
            segment = self.pool.take(stored.size_bytes)
        except StoreFull as error:
            complain(f"version {stored.number} stays on disk: {error}")
            return ""
        try:
            content = self.pool.content(segment)
            self.files.read(stored.key, stored.tensors, content)
            wrong = first_mismatch(content, stored.tensors)
            why = f"tensor {wrong.name!r} is damaged" if wrong is not None else ""
        except (BusError, OSError) as error:
            why = str(error)
        if why:
            complain(f"version {stored.number} of {stored.policy!r} cannot be read back: {why}")
            self.pool.retire(segment, is_reusable=False)
            return ""
        self.pool.freeze(segment)
        return segment

    def _drop(self, stored: StoredVersion) -> None:
        del self.table.by_key[stored.key]
        is_last = self.table.committed.get(stored.policy) == stored.number
        # Damaged files of the version in use are left to a person.
        if self.files is not None and not is_last:
            self.files.remove(stored.key)

    def _tidy(self, files: WeightFiles, predecessors: list[str]) -> None:
        """Delete what earlier processes left behind; offer what they wrote."""
        files.sweep(predecessors)
        for record in self.ledger.records:
            if isinstance(record, Retired):
                files.remove((record.policy, record.version))
        for key in files.taken():
            # Whatever the ledger knows: its directory would be in the way.
            self.table.take_number(*key)
        for stored in self.table.pullable():
            if files.has(stored.key):
                stored.offers.append(Offer("disk", at=place_of(stored.key)))
