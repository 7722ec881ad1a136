"""A publisher that checks keys, and subscribers with several keys."""

import asyncio
from collections.abc import Callable

from rolloutbus.bus.security.zmq_curve import Dialer, dialer_of
from rolloutbus.bus.security.zmq_guard import Doorway, SocketGuard
from rolloutbus.bus.transport.zmq_topics import PubPort, SubPort
from rolloutbus.bus.wire.codec import topic_of
from rolloutbus.bus.wire.entry import Entry
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, PACE_S


class GuardedPublisher:
    """Publishes rows `1`, `2`, … to the topics of clients; keeps what each subscriber received."""

    def __init__(self, keys: KeyDirectory, endpoint: str) -> None:
        self.guard = SocketGuard(keys.server_settings("w0"))
        self.pub = PubPort(endpoint, Doorway(self.guard, "stream"))
        self.n_published = 0
        self.seen: dict[str, list[tuple[str, int]]] = {}
        """Who read -> (whose row, its number)."""
        self.read_at = self.pub.endpoint
        self._keys = keys
        self._subs: list[SubPort] = []

    def close(self) -> None:
        for sub in self._subs:
            sub.close()
        self.pub.close()
        self.guard.close()

    def dialer(self, name: str) -> Dialer:
        made = dialer_of(self._keys.client_settings(name))
        assert made is not None
        return made

    def read(self, name: str, *clients: str) -> list[tuple[str, int]]:
        """Subscribe under a key; the rows that come."""
        rows = self.seen[name] = []

        def take(_: bytes, entries: list[Entry]) -> None:
            rows.extend((entry.route, int(entry.rid)) for entry in entries)

        sub = SubPort(take, clients, dialer=self.dialer(name))
        sub.connect(self.read_at)
        self._subs.append(sub)
        return rows

    def publish(self, *clients: str) -> int:
        """One row for each; the number of the last."""
        for client in clients:
            self.n_published += 1
            self.pub.publish(topic_of(client), Entry("idle", str(self.n_published), route=client))
        return self.n_published

    async def until(self, is_so: Callable[[], bool], *clients: str) -> None:
        """Publish rows until it is so: neither subscription nor its end is told to who reads."""
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():
                self.publish(*clients)
                await asyncio.sleep(PACE_S)  # as said above
