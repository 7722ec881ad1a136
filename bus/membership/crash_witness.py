"""What ran when engines died, as their worker saw it: each new router is told.

A router that was restarted knows nothing of it, and what clients say of their own requests counts
for nothing. Spec: docs/protocol.md, "Poison".
"""

from collections.abc import Collection

KEPT_S = 600.0
"""After this long without another crash a request is a stranger again."""
KEPT_MAX = 1000
"""More requests than that are not remembered; the oldest go first."""


class CrashWitness:
    """Requests under which the engine of this process died."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, float]] = {}
        """rid -> (crashes, crashes while nothing else ran, until when), the oldest first."""

    def saw(self, rids: Collection[str], now: float) -> None:
        """The engine died while these ran."""
        for rid in rids:
            n, n_alone, _ = self._seen.pop(rid, (0, 0, 0.0))
            self._seen[rid] = (n + 1, n_alone + (len(rids) == 1), now + KEPT_S)
        while len(self._seen) > KEPT_MAX:
            del self._seen[next(iter(self._seen))]

    def listed(self, now: float) -> list[tuple[str, int, int]]:
        """(rid, crashes, crashes while nothing else ran) of those that are not too old."""
        return [(rid, n, alone) for rid, (n, alone, until) in self._seen.items() if until > now]
