"""The versions of a run: which ones may be served, and which ones are too old at what time."""

from bisect import bisect_left, insort
from collections.abc import Iterable

from tests.drills.chaos.records import Offered, WeightRecord

FIRST_VERSION = 0
"""The weights that every engine starts with."""


class Ledger:
    """What trainers wrote down about their publications."""

    def __init__(self, records: Iterable[WeightRecord] = ()) -> None:
        self.servable = {FIRST_VERSION}
        """A token of any other version is wrong."""
        self.n_offered = 0
        self._committed: list[tuple[float, int]] = []
        self.add(records)

    def add(self, records: Iterable[WeightRecord]) -> None:
        """More of them, as their trainer wrote them."""
        for record in records:
            if isinstance(record, Offered):
                self.n_offered += 1
                self.servable.add(record.version)
            elif record.outcome == "committed":
                insort(self._committed, (record.at, record.version))
            elif record.outcome == "refuted":
                self.servable.discard(record.version)

    @property
    def n_committed(self) -> int:
        """Versions whose trainer heard that they are in use."""
        return len(self._committed)

    def floor(self, at: float) -> int:
        """The newest version that was known as committed before `at`: nothing older is placed."""
        known = self._committed[: bisect_left(self._committed, (at, FIRST_VERSION))]
        return max((version for _, version in known), default=FIRST_VERSION)
