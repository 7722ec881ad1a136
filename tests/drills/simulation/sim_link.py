"""The connection of a simulated process: each one replaces the last, which is never heard again."""

from collections.abc import Callable

from rolloutbus.bus.wire.entry import Entry
from tests.drills.simulation.memory_ports import MemoryLink, MemoryNet
from tests.drills.simulation.process import Process


class SimLink:
    """What a process says to its router and hears from it, in whatever state the process is."""

    def __init__(
        self,
        process: Process,
        net: MemoryNet,
        endpoints: str,
        on_batch: Callable[[list[Entry]], None],
        on_down: Callable[[], None],
    ) -> None:
        """`endpoints`: one, or several with commas between them, as in an actor's settings."""
        self._process, self._net, self._endpoints = process, net, endpoints.split(",")
        self._on_batch, self._on_down = on_batch, on_down
        self._link: MemoryLink | None = None
        self.send: Callable[[Entry], None] = _lose
        """Queue for the end of this moment; lost without a connection. The connection's own
        method, as the next one: they are called for nearly everything that happens."""
        self.flush: Callable[[], None] = _nothing
        """The end of this moment."""

    def connect(self, n_lost: int) -> None:
        """Drop the connection, if there is one, and make a fresh one, to the next address."""
        self.close()
        endpoint = self._endpoints[n_lost % len(self._endpoints)]
        link = self._link = self._net.link(
            endpoint, self._process.name, self._arrived, self._went_down
        )
        self.send, self.flush = link.send, link.flush

    def close(self) -> None:
        """Drop the connection."""
        if self._link is not None:
            self._link.close()

    def _arrived(self, entries: list[Entry]) -> None:
        process = self._process
        if process.is_alive and process.time.now >= process.frozen_until:
            self._on_batch(entries)
        else:
            process.hear(self._read_late, self._link, entries)

    def _read_late(self, link: MemoryLink, entries: list[Entry]) -> None:
        if link is self._link:
            self._on_batch(entries)

    def _went_down(self) -> None:
        self._process.hear(self._down_late, self._link)

    def _down_late(self, link: MemoryLink) -> None:
        if link is self._link:
            self._on_down()


def _lose(entry: Entry) -> None:
    del entry


def _nothing() -> None:
    pass
