"""Detached requests that nobody here waits for any more: their endings are for another time."""


class Released:
    """Their rids; beyond `limit` the oldest are forgotten, and so acknowledged when they end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._rids)

    def __contains__(self, rid: str) -> bool:
        return rid in self._rids

    def add(self, rid: str) -> None:
        """Nobody waits for it."""
        self._rids[rid] = None
        if len(self._rids) > self._limit:
            del self._rids[next(iter(self._rids))]

    def discard(self, rid: str) -> None:
        """Somebody attaches to it again."""
        self._rids.pop(rid, None)
