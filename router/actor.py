"""The router's shell: two ROUTER sockets in, a tick, effects out. No policy lives here."""

import asyncio
import contextlib
from random import Random
from typing import Self

from bus.clock import BootClock, Clock
from bus.entry import Entry
from bus.ids import Peer
from bus.ports import PortCounters
from bus.zmq_ports import RouterPort
from router.core import RouterCore
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
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            SettingsError: an address is in use or not allowed.
        """
        self._port = RouterPort([self._settings.frontend, self._settings.backend], self._receive)
        self._tick()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; peers notice by silence and come back to the next router."""
        if self._timer is not None:
            self._timer.cancel()
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

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until the event is set."""
        with contextlib.suppress(asyncio.CancelledError):
            await stop.wait()

    def _receive(self, peer: Peer, entries: list[Entry]) -> None:
        self._apply(self.core.receive(peer, entries, self._clock.now()))

    def _tick(self) -> None:
        self._apply(self.core.tick(self._clock.now()))
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _apply(self, effects: list[Effect]) -> None:
        if self._port is not None:
            self._port.apply(effects)
