"""The router's shell: two ROUTER sockets around the loop of its core. No policy lives here."""

from pathlib import Path
from random import Random
from typing import Self

from bus.actor import Actor
from bus.clock import BootClock, Clock
from bus.entry import Entry
from bus.ids import Peer
from bus.ports import PortCounters
from bus.zmq_ports import RouterPort
from router.core import RouterCore
from router.dead_letters import append_letters
from router.outgoing import Effect
from router.settings import RouterSettings

TICK_S = 0.05


class RouterActor:
    """A running router; an async context manager."""

    def __init__(self, settings: RouterSettings, instance: str, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or BootClock()
        self.core = RouterCore(settings, instance, Random(settings.seed))  # noqa: S311 - chooses workers, keeps no secret
        self._port: RouterPort | None = None
        self._actor: Actor[Effect] | None = None

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            SettingsError: an address is in use or not allowed.
        """
        port = RouterPort([self._settings.frontend, self._settings.backend], self._receive)
        self._port = port
        self._actor = Actor(port.apply, clock=self._clock, tick=self._tick, tick_s=TICK_S)
        self._actor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; peers notice by silence and come back to the next router."""
        self.stop()
        if self._port is not None:
            self._port.close()

    @property
    def endpoints(self) -> list[str]:
        """[frontend, backend] with real port numbers."""
        return self._port.endpoints if self._port else []

    @property
    def counters(self) -> PortCounters:
        """What the sockets have carried and dropped."""
        return self._port.counters if self._port else PortCounters()

    def stop(self) -> None:
        """Serve no more."""
        if self._actor is not None:
            self._actor.stop("stopped")

    async def stopped(self) -> None:
        """Serve until `stop`.

        Raises:
            Exception: a bug; the next router takes the table up from its peers.
        """
        if self._actor is not None:
            await self._actor.stopped()

    def _tick(self, now: float) -> list[Effect]:
        effects = self.core.tick(now)
        letters = self.core.take_dead_letters()
        if letters and self._settings.dead_letters:
            try:
                n_kept = append_letters(Path(self._settings.dead_letters), letters)
            except OSError:
                n_kept = 0
            self.core.context.count("dead_letters_dropped", len(letters) - n_kept)
        return effects

    def _receive(self, peer: Peer, entries: list[Entry]) -> None:
        if self._actor is not None:
            self._actor.feed(self.core.receive, peer, entries)
