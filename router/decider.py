"""What a router's shell may ask: of the core itself, or of whatever listens in between."""

from collections.abc import Iterable
from typing import Protocol

from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import Peer
from rolloutbus.router.context import Context
from rolloutbus.router.health.dead_letter import DeadLetter
from rolloutbus.router.outgoing import Effect


class Decider(Protocol):
    """The events of `RouterCore`, which says what they mean."""

    @property
    def context(self) -> Context:
        """The core's tables."""
        ...

    def receive(self, peer: Peer, entries: list[Entry], now: float) -> list[Effect]:
        """See `RouterCore.receive`."""
        ...

    def receive_signed(
        self, peer: Peer, principal: Principal, entries: list[Entry], now: float
    ) -> list[Effect]:
        """See `RouterCore.receive_signed`."""
        ...

    def undelivered(self, peer: Peer, entries: list[Entry], now: float) -> list[Effect]:
        """See `RouterCore.undelivered`."""
        ...

    def malformed(self, peer: Peer, now: float) -> list[Effect]:
        """See `RouterCore.malformed`."""
        ...

    def revoked(self, peers: Iterable[Peer], code: str, now: float) -> list[Effect]:
        """See `RouterCore.revoked`."""
        ...

    def tick(self, now: float) -> list[Effect]:
        """See `RouterCore.tick`."""
        ...

    def take_dead_letters(self) -> list[DeadLetter]:
        """See `RouterCore.take_dead_letters`."""
        ...
