"""Which requests may have killed engines: counted per rid, through all attempts and re-sends."""

from collections import OrderedDict
from dataclasses import dataclass

KEPT_S = 600.0
"""After this long without another crash a request is a stranger again."""
KEPT_MAX = 10_000
"""More suspects than that are not remembered; the oldest go first."""
ALONE_AT = 2
"""Crashes after which a request runs alone."""


@dataclass(slots=True)
class _Record:
    n_crashes: int
    until: float
    is_poison: bool = False


class Suspicions:
    """Engine crashes per request."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()
        """The least recently charged first."""

    def __len__(self) -> int:
        return len(self._records)

    def charge(self, rid: str, now: float) -> int:
        """An engine crashed while this ran; returns how many have."""
        record = self._records.setdefault(rid, _Record(0, now))
        record.n_crashes += 1
        record.until = now + KEPT_S
        self._records.move_to_end(rid)
        if len(self._records) > KEPT_MAX:
            self._records.popitem(last=False)
        return record.n_crashes

    def condemn(self, rid: str, now: float) -> None:
        """It crashed an engine while nothing else ran there."""
        self.charge(rid, now)
        self._records[rid].is_poison = True

    def clear(self, rid: str) -> None:
        """It came to an end without harm."""
        self._records.pop(rid, None)

    def must_be_alone(self, rid: str) -> bool:
        """Whether it shares a worker with nothing else."""
        record = self._records.get(rid)
        return record is not None and record.n_crashes >= ALONE_AT

    def is_poison(self, rid: str) -> bool:
        """Whether it is never run again."""
        record = self._records.get(rid)
        return record is not None and record.is_poison

    def tick(self, now: float) -> None:
        """Forget what is old."""
        while self._records:
            rid, record = next(iter(self._records.items()))
            if record.until > now:
                return
            del self._records[rid]
