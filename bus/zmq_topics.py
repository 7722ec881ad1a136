"""ZeroMQ ports for streams: publishers and subscribers by topic."""

import asyncio
import errno
from collections.abc import Sequence

import zmq

from bus.entry import Entry
from bus.errors import SettingsError
from bus.ports import PortCounters, TopicBatchHandler
from bus.security.zmq_dialer import Dialer
from bus.security.zmq_guard import Doorway
from bus.zmq_monitor import Monitor
from bus.zmq_sockets import Reader, Receiver, TickOutbox, bind_anywhere, bind_local, new_socket

KNOCK_AGAIN_S = 1.0
"""Before a publisher is tried again that did not let us in."""
_PUB_MAX_BYTES_IN = 512
"""A subscription is a topic; anything larger is an attack on the publisher's memory."""
REOPEN_TRIES = 500
REOPEN_PAUSE_S = 0.01


class PubPort:
    """A publisher of batches by topic; slow subscribers lose frames, the publisher never waits."""

    def __init__(
        self, endpoint: str, doorway: Doorway | None = None, *, is_unsafe: bool = False
    ) -> None:
        """Listen; with a `doorway` only to whom it lets in.

        Args:
            endpoint: where.
            doorway: the lock; None: it has none.
            is_unsafe: without a lock, addresses beyond this machine are not refused. For tests.

        Raises:
            SettingsError: the address is in use or not allowed.
        """
        self.counters = PortCounters()
        self._doorway = doorway
        self._bind = bind_anywhere if is_unsafe else bind_local
        self._retry: asyncio.TimerHandle | None = None
        self.n_reopened = 0
        self._open(endpoint)

    def publish(self, topic: bytes, entry: Entry) -> None:
        """Queue for the end of this tick."""
        self._outbox.put(topic, entry)

    def reopen(self) -> None:
        """Drop all subscribers; those that are still let in come back by themselves."""
        self.close()
        self._reopen(REOPEN_TRIES)

    def close(self) -> None:
        """Stop publishing."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._outbox.clear()
        self._socket.close()

    def _open(self, endpoint: str) -> None:
        doorway = self._doorway
        socket = new_socket(zmq.PUB) if doorway is None else doorway.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.MAXMSGSIZE, _PUB_MAX_BYTES_IN)
        self.endpoint = (self._bind if doorway is None else doorway.bind)(socket, endpoint)
        self._socket = socket
        self._outbox = TickOutbox(socket, self.counters, _nothing)

    def _reopen(self, n_tries: int) -> None:
        """An address is free again only a moment after its socket was closed."""
        self._retry = None
        try:
            self._open(self.endpoint)
        except SettingsError:
            if not n_tries:
                raise
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(REOPEN_PAUSE_S, self._reopen, n_tries - 1)
        else:
            self.n_reopened += 1


def _nothing() -> None:
    """A PUB socket has nothing to read."""


class SubPort:
    """A subscriber to any number of publishers; reconnects by itself."""

    def __init__(
        self,
        on_batch: TopicBatchHandler,
        topics: Sequence[bytes],
        *,
        dialer: Dialer | None = None,
    ) -> None:
        """Subscribe to what begins with one of `topics`; with the keys of `dialer` if given."""
        self.counters = PortCounters()
        self._dialer = dialer
        socket = new_socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket = socket
        receiver = Receiver(socket, self.counters, on_batch, has_prefix=True)
        self._reader = Reader(socket, receiver.read_some)
        self._loop = asyncio.get_running_loop()
        self._locked: dict[str, str] = {}
        """Address -> endpoint of the publishers that look at our key."""
        self._monitor: Monitor | None = None
        if dialer is not None:
            refused = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            self._monitor = Monitor(socket, refused, self._refused)

    def connect(self, endpoint: str) -> None:
        """Listen to one more publisher."""
        address = endpoint
        if self._dialer is not None:
            address = self._dialer.dress(self._socket, endpoint)
            self._locked[address] = endpoint
        self._socket.connect(address)
        self._reader.kick()

    def disconnect(self, endpoint: str) -> None:
        """Stop listening to a publisher; unknown ones are ignored."""
        address = endpoint.partition("#")[0]
        self._locked.pop(address, None)
        try:
            self._socket.disconnect(address)
        except zmq.ZMQError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise

    def close(self) -> None:
        """Drop all subscriptions."""
        self._reader.close()
        self._locked.clear()
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close()

    def _refused(self, addresses: set[str]) -> None:
        # libzmq never comes back after that, but the publisher may just not know our key yet.
        for address in addresses & self._locked.keys():
            self._loop.call_later(KNOCK_AGAIN_S, self._knock_again, address)

    def _knock_again(self, address: str) -> None:
        endpoint = self._locked.get(address)
        if endpoint is not None:
            self.disconnect(endpoint)
            self.connect(endpoint)
