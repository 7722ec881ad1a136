"""ZeroMQ ports for streams: publishers and subscribers by topic."""

import asyncio
import errno
from collections.abc import Callable, Sequence

import zmq

from rolloutbus.bus.security.topics import claim_of
from rolloutbus.bus.security.zmq_dialer import Dialer
from rolloutbus.bus.security.zmq_guard import Doorway
from rolloutbus.bus.security.zmq_turnstile import Turnstile
from rolloutbus.bus.transport.ports import PortCounters, TopicBatchHandler
from rolloutbus.bus.transport.zmq_admission import Admission
from rolloutbus.bus.transport.zmq_monitor import LinkEvent, Monitor
from rolloutbus.bus.transport.zmq_sockets import (
    Reader,
    Receiver,
    TickOutbox,
    allow_v6,
    bind_anywhere,
    bind_local,
    limit_frames,
    new_socket,
)
from rolloutbus.bus.wire.codec import topic_of
from rolloutbus.bus.wire.entry import Entry

KNOCK_AGAIN_S = 1.0
"""Before a publisher is tried again that did not let us in."""
LOOK_S = 0.02
"""A send may swallow the sign of a new subscription. To look after each would cost more than it."""
MAX_UNREAD = 10_000
"""Messages that wait at each end of a connection; beyond, the publisher drops what comes."""
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_PUB_MAX_BYTES_IN = 512
"""A subscription is a topic; anything larger is an attack on the publisher's memory."""


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
        socket = new_socket(zmq.PUB) if doorway is None else doorway.socket(zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        limit_frames(socket, _PUB_MAX_BYTES_IN)
        self._socket = socket
        self._reader: Reader | None = None
        self._look: asyncio.TimerHandle | None = None
        if doorway is None:
            self.endpoint = (bind_anywhere if is_unsafe else bind_local)(socket, endpoint)
        else:
            turnstile = Turnstile(socket, doorway, self.counters)
            self.endpoint = doorway.bind(socket, endpoint)
            self._reader = Reader(socket, turnstile.read_some)
        self._admission = Admission(socket, self.counters)
        self._outbox = TickOutbox(socket, self.counters, self._sent)

    def publish(self, topic: bytes, entry: Entry) -> None:
        """Queue for the end of this tick."""
        self._outbox.put(topic, entry)

    def publish_all(self, topic: bytes, entries: list[Entry]) -> None:
        """Queue a batch, which may be empty; the list is the port's from now on."""
        self._outbox.put_all(topic, entries)

    def pass_on(self, frames: Sequence[zmq.Frame]) -> None:
        """Publish a message of another publisher as it is: topic, batch and body frame."""
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)  # type: ignore[arg-type] - frames pass
        self.counters.frames_out += 1
        self._sent()

    def close(self) -> None:
        """Stop publishing."""
        if self._look is not None:
            self._look.cancel()
        if self._reader is not None:
            self._reader.close()
        self._admission.close()
        self._outbox.clear()
        self._socket.close()

    def _sent(self) -> None:
        if self._reader is not None and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_for_subscriptions)

    def _look_for_subscriptions(self) -> None:
        self._look = None
        if self._reader is not None:
            self._reader.kick()


ReadSome = Callable[[], bool]
"""Read some of what waits; True if there may be more."""


class Subscription:
    """A socket that is subscribed to any number of publishers; reconnects by itself."""

    def __init__(
        self,
        reading: Callable[[zmq.Socket[bytes], PortCounters], ReadSome],
        clients: Sequence[str] = (),
        *,
        dialer: Dialer | None = None,
    ) -> None:
        """Subscribe to the rows of these clients, or of all.

        Args:
            reading: how messages are read from the socket.
            clients: whose rows; empty: everybody's.
            dialer: the keys to connect with.
        """
        self.counters = PortCounters()
        self._dialer = dialer.exact if dialer is not None else None
        socket = new_socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        for client in clients:
            socket.setsockopt(zmq.SUBSCRIBE, topic_of(client))
            if dialer is not None:
                socket.setsockopt(zmq.SUBSCRIBE, claim_of(client))
        if not clients:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket = socket
        self._read = reading(socket, self.counters)
        self._reader = Reader(socket, self._read_some)
        self._loop = asyncio.get_running_loop()
        self._locked: dict[str, str] = {}
        """Address -> endpoint of the publishers that look at our key."""
        events = int(zmq.EVENT_DISCONNECTED) | _REFUSED
        self._monitor = Monitor(socket, events, self._hear_of_links)

    def connect(self, endpoint: str) -> None:
        """Listen to one more publisher."""
        address = endpoint
        if self._dialer is not None:
            address = self._dialer.dress(self._socket, endpoint)
            self._locked[address] = endpoint
        allow_v6(self._socket, address)
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
        self._monitor.close()
        self._socket.close()

    def _read_some(self) -> bool:
        counters = self.counters
        n_before = counters.frames_in
        has_more = self._read()
        n_read = counters.frames_in - n_before
        counters.streak_in = counters.streak_in + n_read if has_more else 0
        return has_more

    def _hear_of_links(self, events: Sequence[LinkEvent]) -> None:
        self.counters.broken += sum(event.kind == zmq.EVENT_DISCONNECTED for event in events)
        refused = {event.address for event in events if event.kind & _REFUSED}
        # libzmq never comes back after that, but the publisher may just not know our key yet.
        for address in refused & self._locked.keys():
            self._loop.call_later(KNOCK_AGAIN_S, self._knock_again, address)

    def _knock_again(self, address: str) -> None:
        endpoint = self._locked.get(address)
        if endpoint is not None:
            self.disconnect(endpoint)
            self.connect(endpoint)


class SubPort(Subscription):
    """A subscriber that is told of batches."""

    def __init__(
        self,
        on_batch: TopicBatchHandler,
        clients: Sequence[str] = (),
        *,
        dialer: Dialer | None = None,
    ) -> None:
        """Subscribe to the rows of these clients, or of all; with the keys of `dialer` if given."""

        def reading(socket: zmq.Socket[bytes], counters: PortCounters) -> ReadSome:
            return Receiver(socket, counters, on_batch, has_prefix=True).read_some

        super().__init__(reading, clients, dialer=dialer)
