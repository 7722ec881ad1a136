"""Publishes all that the router receives and sends, at once, for recorders.

Only where a tap was asked for.
Spec: docs/protocol.md, "The tap".
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from rolloutbus.bus.actor.effects import ForgetPeer
from rolloutbus.bus.streams.tap import TapEvent, TapMark
from rolloutbus.bus.wire.codec import frames_of
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.router.context import Context
from rolloutbus.router.events import (
    Counted,
    Effect,
    Event,
    Handle,
    KeysChanged,
    LettersKept,
    Malformed,
    Received,
    Returned,
    Revoked,
    Ticked,
)

MAX_CONNECTIONS = 100_000
"""More are not remembered: who was known longest gets a new number when it speaks again."""

Publish = Callable[[bytes, list[Entry]], bool]
Count = Callable[[str, int], None]


class TapFeed:
    """Publishes each event with its effects, and numbers the connections."""

    def __init__(self, context: Context, publish: Publish, count: Count) -> None:
        """Listen in.

        Args:
            context: the tables of the core that is listened to: who is at a connection.
            publish: sends one batch under a topic; it never waits, and is False if it has no room.
            count: adds to a counter that `status` shows.
        """
        self._context = context
        self._publish = publish
        self._count = count
        self._n = 0
        self._n_connections = 0
        self._connections: dict[Peer, tuple[int, str]] = {}
        """Number of each, and the name of who is there as far as it is known."""

    def tell(self, event: Event, effects: Sequence[Effect], now: float) -> None:
        """Publishes the core's event, then its effects."""
        match event:
            case Received(peer, entries):
                self._batch("received", peer, entries, now)
            case Returned(peer, entries):
                self._batch("undelivered", peer, entries, now)
            case Malformed(peer):
                self._batch("malformed", peer, [], now)
            case Revoked(peers):
                for peer in peers:
                    self._batch("revoked", peer, [], now)
            case Ticked():
                self._batch("tick", None, [], now)
            case Counted() | LettersKept():
                return  # between the core and its shell
            case KeysChanged():
                pass  # it has no sign of its own; what is sent to members for it follows
            case _:
                assert_never(event)
        for effect in effects:
            if not isinstance(effect, ForgetPeer):
                self._batch("sent", effect.peer, effect.entries, now)
        for effect in effects:
            if isinstance(effect, ForgetPeer):
                self._connections.pop(effect.peer, None)

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
        context = self._context
        record = context.clients.at(peer) or context.members.at(peer)
        number = self._n_connections if known is None else known[0]
        known = self._connections[peer] = number, "" if record is None else record.name
        return known


def tapped(handle: Handle, tap: TapFeed) -> Handle:
    """The same decisions, each of which is published."""

    def handle_and_tell(event: Event, now: float) -> list[Effect]:
        effects = handle(event, now)
        tap.tell(event, effects, now)
        return effects

    return handle_and_tell
