"""Which requests may have killed engines: counted per rid, through all attempts and re-sends."""

from collections import OrderedDict
from dataclasses import dataclass, field

KEPT_S = 600.0
"""After this long without another crash a request is a stranger again."""
KEPT_MAX = 10_000
"""More suspects than that are not remembered; the oldest go first."""
ALONE_AT = 2
"""Crashes after which a request runs alone."""
POISON_AT = 2
"""Crashes while nothing else ran, the last of them in the isolation lane, that prove it: one may be
the engine's own misfortune. So a poisonous request dies at most ALONE_AT + POISON_AT times."""

ELSEWHERE = "@"
"""Stands for a worker that a former router knew; no name looks like this."""


@dataclass(slots=True)
class _Record:
    n_crashes: int
    until: float
    alone_on: list[str] = field(default_factory=list[str])
    """Workers whose engine crashed while nothing else ran there."""
    is_poison: bool = False


class Suspicions:
    """Engine crashes per request."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()
        """The least recently charged first."""

    def __len__(self) -> int:
        return len(self._records)

    def charge(self, rid: str, now: float, *, alone_on: str = "") -> None:
        """An engine crashed while this ran; `alone_on` names its worker if nothing else did."""
        record = self._records.setdefault(rid, _Record(0, now))
        record.n_crashes += 1
        record.until = now + KEPT_S
        if alone_on:
            record.alone_on.append(alone_on)
        self._records.move_to_end(rid)
        if len(self._records) > KEPT_MAX:
            self._records.popitem(last=False)

    def claim(self, rid: str, n_crashes: int, now: float) -> None:
        """Its client was told of so many crashes, maybe by another router: believe the more.

        Whoever had crashed ALONE_AT engines ran alone from then on, so the rest were alone; on
        which workers nobody remembers.
        """
        record = self._records.get(rid)
        n_known = 0 if record is None else record.n_crashes
        for n_before in range(n_known, min(n_crashes, ALONE_AT + POISON_AT)):
            self.charge(rid, now, alone_on=ELSEWHERE if n_before >= ALONE_AT else "")

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
        """Names of the workers whose engine crashed under it alone, one for each crash."""
        record = self._records.get(rid)
        return [] if record is None else record.alone_on

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
