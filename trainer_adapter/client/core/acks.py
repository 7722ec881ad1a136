"""Acknowledgements of endings, gathered per worker until the end of the tick.

Those of detached requests also say that the request is over, and say so again on each fresh link.
Spec: docs/protocol.md, "Commands", 3, and "Detached requests", 6.
"""

from collections.abc import Iterator

from rolloutbus.bus.actor.effects import THE_LINK, Send
from rolloutbus.bus.membership.tombstones import SettledRequests
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.messages.endings import Ack, AttemptList
from rolloutbus.trainer_adapter.client.core.effects import Effect


class Released:
    """Rids that no caller waits for; beyond `limit`, the oldest are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._rids)

    def __contains__(self, rid: str) -> bool:
        return rid in self._rids

    def add(self, rid: str) -> None:
        """Adds a request that no caller waits for any more."""
        self._rids[rid] = None
        if len(self._rids) > self._limit:
            del self._rids[next(iter(self._rids))]

    def discard(self, rid: str) -> None:
        """Removes a request: a caller attaches to it again."""
        self._rids.pop(rid, None)


MAX_PER_ENTRY = 1000


class Acks:
    """Acknowledges every ending of every attempt, so that the worker may forget it."""

    def __init__(self, out: list[Effect]) -> None:
        self._out = out
        self._waiting: dict[str, AttemptList] = {}
        self._over = SettledRequests()
        self._untold: dict[str, None] = {}
        """Rids of ended requests that the router has not been notified of."""

    @property
    def is_empty(self) -> bool:
        """Whether no acknowledgement is queued."""
        return not self._waiting and not self._untold

    def add(self, worker: str, rid: str, attempt: Attempt) -> None:
        """Queues the acknowledgement of an ending from a worker."""
        self._waiting.setdefault(worker, []).append((rid, attempt))

    def over(self, rid: str, now: float) -> None:
        """Records that a detached request has ended for its caller."""
        self._over.add(rid, now)
        self._untold[rid] = None

    def is_over(self, rid: str) -> bool:
        """Whether it is a detached request that has ended for its caller lately."""
        return rid in self._over

    def say_again(self, now: float) -> None:
        """Sends all ended rids again: a new router may not know them."""
        self._over.expire(now)
        self._untold = dict.fromkeys(self._over)
        self.flush()

    def flush(self) -> None:
        """Sends the queued acknowledgements, grouped by worker."""
        waiting, self._waiting = self._waiting, {}
        for worker, items in waiting.items():
            for start in range(0, len(items), MAX_PER_ENTRY):
                self._say(f"worker:{worker}", items[start : start + MAX_PER_ENTRY])
        if self._untold:
            self._out.append(Send(THE_LINK, Entry("ack", body=pack(Ack([], list(self._untold))))))
            self._untold.clear()

    def drop(self) -> None:
        """The link is down: workers send again what was not acknowledged."""
        self._waiting.clear()
        self._untold.clear()

    def _say(self, route: str, items: AttemptList) -> None:
        over = list(self._told(items)) if self._untold else []
        self._out.append(Send(THE_LINK, Entry("ack", route=route, body=pack(Ack(items, over)))))

    def _told(self, items: AttemptList) -> Iterator[str]:
        """Yields the rids among `items` that have ended, and marks them as reported."""
        for rid, _ in items:
            if rid in self._untold:
                del self._untold[rid]
                yield rid
