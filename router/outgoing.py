"""Effects collected while one batch or tick is handled: per peer, in order."""

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import Peer

Effect = SendAll | ForgetPeer


class Outgoing:
    """Where every part of the router core puts what it wants sent."""

    def __init__(self) -> None:
        self._queues: dict[Peer, SendAll] = {}
        self._forgotten: list[Peer] = []

    def send(self, peer: Peer, entry: Entry) -> None:
        """Send an entry to a peer."""
        queue = self._queues.get(peer)
        if queue is None:
            self._queues[peer] = SendAll(peer, [entry])
        else:
            queue.entries.append(entry)

    def queue(self, peer: Peer) -> list[Entry]:
        """What is sent to a peer with the next `take`, to be appended to."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = SendAll(peer, [])
        return queue.entries

    def forget(self, peer: Peer) -> None:
        """Tell the shell that nothing more will be sent to this connection."""
        self._forgotten.append(peer)

    def take(self) -> list[Effect]:
        """Everything since the last call."""
        if not self._queues and not self._forgotten:
            return []
        effects: list[Effect] = [*self._queues.values()]
        self._queues = {}
        if self._forgotten:
            effects += map(ForgetPeer, self._forgotten)
            self._forgotten = []
        return effects
