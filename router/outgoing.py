"""Effects collected while one batch or tick is handled, in order."""

from bus.effects import Forget, Send
from bus.entry import Entry
from bus.ids import Peer

Effect = Send | Forget


class Outgoing:
    """Where every part of the router core puts what it wants sent."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def send(self, peer: Peer, entry: Entry) -> None:
        """Send an entry to a peer."""
        self._effects.append(Send(peer, entry))

    def forget(self, peer: Peer) -> None:
        """Tell the shell that nothing more will be sent to this connection."""
        self._effects.append(Forget(peer))

    def take(self) -> list[Effect]:
        """Everything since the last call."""
        effects, self._effects = self._effects, []
        return effects
