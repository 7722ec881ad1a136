"""Which requests may have killed engines: counted per rid, through all attempts and re-sends.

Only what this router saw and what workers saw counts, never what a client says of itself: whoever
is a suspect gets a worker alone.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec


class DeadLetter(msgspec.Struct, frozen=True):
    """One poisonous request."""

    rid: str
    client: str
    reason: str
    body: msgspec.Raw
    """Its `Generate` as last sent; an empty map when it was too large, or never seen here."""


KEPT_S = 600.0
"""After this long without another crash a request is a stranger again."""
KEPT_MAX = 10_000
"""More suspects than that are not remembered; the oldest go first."""
ALONE_AT = 2
"""Crashes after which a request runs alone."""
POISON_AT = 2
"""Crashes while nothing else ran, the last of them in the isolation lane, that prove it: one may be
the engine's own misfortune. So a poisonous request dies at most ALONE_AT + POISON_AT times."""


@dataclass(slots=True)
class _Record:
    until: float
    by_worker: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Worker -> (times that its engine crashed while this ran, and while nothing else did)."""
    is_poison: bool = False

    @property
    def n_crashes(self) -> int:
        return sum(n for n, _ in self.by_worker.values())


class Suspicions:
    """Engine crashes per request."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()
        """The least recently charged first."""

    def __len__(self) -> int:
        return len(self._records)

    def charge(self, rid: str, now: float, *, worker: str, is_alone: bool = False) -> None:
        """The engine of a worker crashed while this ran there, perhaps alone."""
        record = self._records.get(rid)
        n, n_alone = (0, 0) if record is None else record.by_worker.get(worker, (0, 0))
        self._note(rid, worker, (n + 1, n_alone + is_alone), now)

    def reported(self, rid: str, worker: str, counts: tuple[int, int], now: float) -> None:
        """A worker says what it saw (crashes, those while nothing else ran): believe the more.

        It may have seen it before this router began.
        """
        record = self._records.get(rid)
        n, n_alone = (0, 0) if record is None else record.by_worker.get(worker, (0, 0))
        if counts[0] > n or counts[1] > n_alone:
            self._note(rid, worker, (max(n, counts[0]), max(n_alone, counts[1])), now)

    def _note(self, rid: str, worker: str, counts: tuple[int, int], now: float) -> None:
        record = self._records.setdefault(rid, _Record(now))
        record.by_worker[worker] = counts
        record.until = now + KEPT_S
        self._records.move_to_end(rid)
        if len(self._records) > KEPT_MAX:
            self._records.popitem(last=False)

    def condemn(self, rid: str) -> None:
        """It is proven."""
        self._records[rid].is_poison = True

    def clear(self, rid: str) -> None:
        """It came to an end without harm."""
        self._records.pop(rid, None)

    def must_be_alone(self, rid: str) -> bool:
        """Whether it shares a worker with nothing else."""
        record = self._records.get(rid)
        return record is not None and record.n_crashes >= ALONE_AT

    def crashed_alone_on(self, rid: str) -> list[str]:
        """Names workers whose engine crashed while it ran this request alone; once per crash."""
        record = self._records.get(rid)
        if record is None:
            return []
        return [name for name, (_, n_alone) in record.by_worker.items() for _ in range(n_alone)]

    def is_proven(self, rid: str) -> bool:
        """Whether its crashes cannot be put down to chance any more."""
        return len(self.crashed_alone_on(rid)) >= POISON_AT

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
