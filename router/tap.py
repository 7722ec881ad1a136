"""What the router is told and what it says, published as it happens, for whoever records it.

It stands between the shell and the core, and only where a tap was asked for.
Spec: docs/protocol.md, "The tap".
"""

from collections.abc import Callable, Iterable, Sequence

from rolloutbus.bus.actor.effects import Forget
from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.streams.tap import TapEvent, TapMark
from rolloutbus.bus.wire.codec import frames_of
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import Peer
from rolloutbus.router.context import Context
from rolloutbus.router.decider import Decider
from rolloutbus.router.health.dead_letter import DeadLetter
from rolloutbus.router.outgoing import Effect

MAX_CONNECTIONS = 100_000
"""More are not remembered: who was known longest gets a new number when it speaks again."""

Publish = Callable[[bytes, list[Entry]], bool]
Count = Callable[[str, int], None]


class TappedCore:
    """The core's own events, each of which is published with its effects."""

    def __init__(self, core: Decider, publish: Publish, count: Count) -> None:
        """Listen in.

        Args:
            core: whose turns are told.
            publish: sends one batch under a topic; it never waits, and is False if it has no room.
            count: adds to a counter that `status` shows.
        """
        self._core = core
        self._publish = publish
        self._count = count
        self._n = 0
        self._n_connections = 0
        self._connections: dict[Peer, tuple[int, str]] = {}
        """Number of each, and the name of who is there as far as it is known."""

    @property
    def context(self) -> Context:
        """The core's tables."""
        return self._core.context

    def receive(self, peer: Peer, entries: list[Entry], now: float) -> list[Effect]:
        """See `RouterCore.receive`."""
        effects = self._core.receive(peer, entries, now)
        return self._tell("received", peer, entries, effects, now)

    def receive_signed(
        self, peer: Peer, principal: Principal, entries: list[Entry], now: float
    ) -> list[Effect]:
        """See `RouterCore.receive_signed`."""
        effects = self._core.receive_signed(peer, principal, entries, now)
        return self._tell("received", peer, entries, effects, now)

    def undelivered(self, peer: Peer, entries: list[Entry], now: float) -> list[Effect]:
        """See `RouterCore.undelivered`."""
        effects = self._core.undelivered(peer, entries, now)
        return self._tell("undelivered", peer, entries, effects, now)

    def malformed(self, peer: Peer, now: float) -> list[Effect]:
        """See `RouterCore.malformed`."""
        return self._tell("malformed", peer, [], self._core.malformed(peer, now), now)

    def revoked(self, peers: Iterable[Peer], code: str, now: float) -> list[Effect]:
        """See `RouterCore.revoked`."""
        effects: list[Effect] = []
        for peer in peers:
            said = self._core.revoked([peer], code, now)
            effects += self._tell("revoked", peer, [], said, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """See `RouterCore.tick`."""
        return self._tell("tick", None, [], self._core.tick(now), now)

    def take_dead_letters(self) -> list[DeadLetter]:
        """See `RouterCore.take_dead_letters`."""
        return self._core.take_dead_letters()

    def _tell(
        self,
        event: TapEvent,
        peer: Peer | None,
        entries: Sequence[Entry],
        effects: list[Effect],
        now: float,
    ) -> list[Effect]:
        self._batch(event, peer, entries, now)
        for effect in effects:
            if not isinstance(effect, Forget):
                self._batch("sent", effect.peer, effect.entries, now)
        for effect in effects:
            if isinstance(effect, Forget):
                self._connections.pop(effect.peer, None)
        return effects

    def _batch(
        self, event: TapEvent, peer: Peer | None, entries: Sequence[Entry], now: float
    ) -> None:
        connection, name = (0, "") if peer is None else self._connection(peer)
        # A list of our own: the port that the effects go to goes on to fill theirs.
        for frame in frames_of(list(entries)):
            mark = TapMark(event, self._n, now, connection, name)
            self._n += 1  # also if nobody gets it: so they learn what they have missed
            if not self._publish(mark.topic, frame):
                self._count("tap_dropped", 1)

    def _connection(self, peer: Peer) -> tuple[int, str]:
        known = self._connections.get(peer)
        if known is not None and known[1]:
            return known
        if known is None:
            self._n_connections += 1
            if len(self._connections) >= MAX_CONNECTIONS:  # of those who never said hello
                del self._connections[next(iter(self._connections))]
        context = self._core.context
        record = context.clients.at(peer) or context.members.at(peer)
        number = self._n_connections if known is None else known[0]
        known = self._connections[peer] = number, "" if record is None else record.name
        return known
