"""Connections that break the protocol again and again: counted, dismissed, then not listened to.

A dismissed connection is its peer's to close; one that goes on is ignored instead.
Spec: docs/protocol.md, "Limits".
"""

from collections import OrderedDict

from rolloutbus.bus.wire.ids import Peer

OFFENCES = 10
"""Malformed messages of one connection within WINDOW_S that end it."""
WINDOW_S = 60.0
SHUNNED_S = 60.0
"""A dismissed connection that said nothing for so long is heard again."""
REMEMBERED = 10_000
"""Connections on either list; whoever opens many pushes their own oldest ones out."""


class Offences:
    """Counts per connection, bounded, oldest first out."""

    def __init__(self) -> None:
        self._counted: OrderedDict[Peer, tuple[int, float]] = OrderedDict()
        """connection -> (offences, when the window began)."""
        self.shunned: OrderedDict[Peer, float] = OrderedDict()
        """Dismissed connections, and when each was last heard; seldom anything but empty."""

    def add(self, peer: Peer, now: float) -> bool:
        """Count one more; True if the connection must go."""
        n, since = self._counted.pop(peer, (0, now))
        if now - since > WINDOW_S:
            n, since = 0, now
        if n + 1 < OFFENCES:
            self._counted[peer] = (n + 1, since)
            _trim(self._counted)
            return False
        self.shunned[peer] = now
        _trim(self.shunned)
        return True

    def is_shunned(self, peer: Peer, now: float) -> bool:
        """Whether what this connection says is dropped unread."""
        heard_at = self.shunned.pop(peer, None)
        if heard_at is None or now - heard_at > SHUNNED_S:
            return False
        self.shunned[peer] = now
        return True

    def tick(self, now: float) -> None:
        """Forget connections that fell silent."""
        while self.shunned and now - next(iter(self.shunned.values())) > SHUNNED_S:
            self.shunned.popitem(last=False)
        while self._counted and now - next(iter(self._counted.values()))[1] > WINDOW_S:
            self._counted.popitem(last=False)


def _trim(remembered: "OrderedDict[Peer, tuple[int, float]] | OrderedDict[Peer, float]") -> None:
    if len(remembered) > REMEMBERED:
        remembered.popitem(last=False)
