"""ZeroMQ ports: links, stars and topics over real sockets."""

import asyncio
import errno
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import zmq
import zmq.utils.monitor

from bus.effects import Forget, SendAll
from bus.entry import Entry
from bus.errors import SettingsError
from bus.ids import Peer
from bus.ports import BatchHandler, DownHandler, PeerBatchHandler, PortCounters, TopicBatchHandler
from bus.zmq_sockets import Reader, Receiver, TickOutbox, bind_local, new_socket

_PUB_MAX_BYTES_IN = 512
"""A subscription is a topic; anything larger is an attack on the publisher's memory."""


class DealerPort:
    """One end of a link: a fresh socket with a fresh routing id; never reconnects by itself."""

    def __init__(
        self,
        endpoint: str,
        on_batch: BatchHandler,
        on_down: DownHandler | None = None,
        *,
        bind: bool = False,
    ) -> None:
        self.counters = PortCounters()
        socket = new_socket(zmq.DEALER)
        # The first byte must not be zero: libzmq keeps those ids for itself.
        socket.setsockopt(zmq.ROUTING_ID, b"\x01" + secrets.token_bytes(15))
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        self._socket = socket
        self._watch = _DownWatch(socket, on_down) if on_down else None
        if bind:
            self.endpoint = bind_local(socket, endpoint)
        else:
            socket.connect(endpoint)
            self.endpoint = endpoint

        def deliver(_: bytes, entries: list[Entry]) -> None:
            on_batch(entries)

        receiver = Receiver(socket, self.counters, deliver, has_prefix=False)
        self._reader = Reader(socket, lambda: self._readable(receiver))
        self._outbox = TickOutbox(socket, self.counters, self._reader.after_send)
        self.send: Callable[[Entry], None] = partial(self._outbox.put, b"")
        """Queue for the end of this tick; waits for the link to come up."""

    def close(self, *, linger_ms: int = 0) -> None:
        """Drop the link; what is queued has `linger_ms` milliseconds left to get out."""
        self._reader.close()
        if linger_ms:
            self._outbox.flush()
        self._outbox.clear()
        if self._watch:
            self._watch.close()
        self._socket.close(linger_ms)

    def _readable(self, receiver: Receiver) -> bool:
        has_more = receiver.read_some()
        if self._outbox.has_waiting and not self._socket.closed:
            self._outbox.flush()
        return has_more


class _DownWatch:
    """Tells when a link is gone for good, from libzmq's own events."""

    def __init__(self, socket: zmq.Socket[bytes], on_down: DownHandler) -> None:
        self._loop = asyncio.get_running_loop()
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._owner = socket
        monitor = socket.get_monitor_socket(events)
        self._socket = monitor
        self._on_down = on_down
        self._fd = int(monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._owner.disable_monitor()
            self._socket.close()

    def _drain(self) -> None:
        if self._is_closed:
            return
        is_down = False
        while True:
            try:
                zmq.utils.monitor.recv_monitor_message(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                break
            is_down = True
        if is_down:
            self._on_down()


class RouterPort:
    """The middle of the star: one ROUTER socket per endpoint, one space of routing ids."""

    def __init__(self, endpoints: Sequence[str], on_batch: PeerBatchHandler) -> None:
        self.counters = PortCounters()
        self._lanes: list[_RouterLane] = []
        self._outbox_of: dict[bytes, TickOutbox] = {}
        try:
            for endpoint in endpoints:
                lane = _RouterLane(endpoint, self.counters, on_batch, self._outbox_of)
                self._lanes.append(lane)
        except SettingsError:
            self.close()
            raise

    @property
    def endpoints(self) -> list[str]:
        """Where it listens, with real port numbers."""
        return [lane.endpoint for lane in self._lanes]

    def send(self, peer: Peer, entry: Entry) -> None:
        """Queue for the end of this tick; dropped and counted if the peer is gone or full."""
        outbox = self._outbox_of.get(peer)
        if outbox is None:
            self.counters.dropped_out += 1
        else:
            outbox.put(peer, entry)

    def apply(self, effects: Iterable[SendAll | Forget]) -> None:
        """What a core wants, in order."""
        for effect in effects:
            outbox = self._outbox_of.get(effect.peer)
            if isinstance(effect, Forget):
                self._outbox_of.pop(effect.peer, None)
            elif outbox is None:
                self.counters.dropped_out += len(effect.entries)
            else:
                outbox.put_all(effect.peer, effect.entries)

    def forget(self, peer: Peer) -> None:
        """The peer will not be sent to any more."""
        self._outbox_of.pop(peer, None)

    def close(self) -> None:
        """Drop all links."""
        for lane in self._lanes:
            lane.close()


class _RouterLane:
    """One ROUTER socket."""

    def __init__(
        self,
        endpoint: str,
        counters: PortCounters,
        on_batch: PeerBatchHandler,
        outbox_of: dict[bytes, TickOutbox],
    ) -> None:
        socket = new_socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.BACKLOG, 4_096)
        self.endpoint = bind_local(socket, endpoint)
        self._socket = socket

        def deliver(peer: bytes, entries: list[Entry]) -> None:
            if peer not in outbox_of:
                outbox_of[peer] = outbox
            on_batch(Peer(peer), entries)

        receiver = Receiver(socket, counters, deliver, has_prefix=True)
        self._reader = Reader(socket, receiver.read_some)
        self._outbox = outbox = TickOutbox(socket, counters, self._reader.after_send)

    def close(self) -> None:
        self._reader.close()
        self._outbox.clear()
        self._socket.close()


class PubPort:
    """A publisher of batches by topic; slow subscribers lose frames, the publisher never waits."""

    def __init__(self, endpoint: str) -> None:
        self.counters = PortCounters()
        socket = new_socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.MAXMSGSIZE, _PUB_MAX_BYTES_IN)
        self.endpoint = bind_local(socket, endpoint)
        self._socket = socket
        self._outbox = TickOutbox(socket, self.counters, _nothing)

    def publish(self, topic: bytes, entry: Entry) -> None:
        """Queue for the end of this tick."""
        self._outbox.put(topic, entry)

    def close(self) -> None:
        """Stop publishing."""
        self._outbox.clear()
        self._socket.close()


def _nothing() -> None:
    """A PUB socket has nothing to read."""


class SubPort:
    """A subscriber to any number of publishers; reconnects by itself."""

    def __init__(self, on_batch: TopicBatchHandler, topics: Sequence[bytes]) -> None:
        self.counters = PortCounters()
        socket = new_socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket = socket
        receiver = Receiver(socket, self.counters, on_batch, has_prefix=True)
        self._reader = Reader(socket, receiver.read_some)

    def connect(self, endpoint: str) -> None:
        """Listen to one more publisher."""
        self._socket.connect(endpoint)
        self._reader.kick()

    def disconnect(self, endpoint: str) -> None:
        """Stop listening to a publisher; unknown ones are ignored."""
        try:
            self._socket.disconnect(endpoint)
        except zmq.ZMQError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise

    def close(self) -> None:
        """Drop all subscriptions."""
        self._reader.close()
        self._socket.close()
