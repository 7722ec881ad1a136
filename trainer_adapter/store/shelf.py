"""What a store finds when it starts: its ledger read, its bytes taken over, leftovers swept.

A store that crashed left its sealed segments in shared memory; its successor on the same
directory adopts them, so that late workers can still catch up.
"""

from pathlib import Path

from bus.host import SHM_DIR
from bus.manifest import first_mismatch
from bus.shm import SegmentGone
from trainer_adapter.store.ledger import Ledger
from trainer_adapter.store.records import Opened
from trainer_adapter.store.segments import SegmentPool, sweep
from trainer_adapter.store.versions import StoredVersion, VersionTable


class Shelf:
    """The ledger, the segments and the versions in them, consistent with one another."""

    def __init__(self, directory: Path, shm_dir: Path = SHM_DIR) -> None:
        """Take over what is there.

        Raises:
            SettingsError: another store uses the directory, or its ledger is damaged.
        """
        self.ledger = Ledger(directory / "versions.ledger")
        self.table = VersionTable()
        self.table.restore(self.ledger.records)
        self.pool = SegmentPool(shm_dir)
        for stored in self.table.pullable():
            self._adopt(stored)
        self.ledger.rewrite([Opened(self.pool.owner), *self.table.snapshot()])
        predecessors = {each.owner for each in self.ledger.records if isinstance(each, Opened)}
        sweep(shm_dir, dead_owners=frozenset(predecessors))

    def close(self) -> None:
        """Give all shared memory back: the versions are gone, their numbers stay taken."""
        self.pool.close()
        self.ledger.close()

    def _adopt(self, stored: StoredVersion) -> None:
        try:
            stored.segment = self.pool.adopt(stored.segment, stored.size_bytes)
        except SegmentGone:
            del self.table.by_key[stored.key]
            return
        if first_mismatch(self.pool.content(stored.segment), stored.tensors) is not None:
            self.pool.retire(stored.segment, is_reusable=False)
            del self.table.by_key[stored.key]
