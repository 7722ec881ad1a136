"""ZeroMQ ports for streams: publishers and subscribers by topic.

Besides the plain `PubPort`: `TapPort` bounds in bytes what slow subscribers hold up,
`PatientPubPort` waits for them, `ForwardPort` publishes again what other publishers send.
"""

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from rolloutbus.bus.security.principals import claim_of, is_claim
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.security.zmq_guard import Doorway, SubscriptionGate
from rolloutbus.bus.transport.endpoints import HOW_TO_BE_REACHED
from rolloutbus.bus.transport.ports import EVERYBODY, PortCounters, TopicBatchHandler
from rolloutbus.bus.transport.zmq_batches import (
    Drain,
    Reader,
    Receiver,
    TickOutbox,
)
from rolloutbus.bus.transport.zmq_sockets import (
    ConnectionLimit,
    LinkEvent,
    Monitor,
    allow_v6,
    bind_anywhere,
    bind_local,
    limit_frames,
    new_socket,
)
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES, SIGNATURE, encode_batch, topic_of
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES

UNREACHED_S = 3.0
"""Without a handshake for so long a publisher is reported as out of reach."""
CONNECT_MS = 5_000
"""For one try: without a limit a try that a firewall swallows lasts two minutes."""
KNOCK_AGAIN_S = 1.0
"""Before a publisher is tried again that did not let us in."""
LOOK_S = 0.02
"""A send may swallow the sign of a new subscription. To look after each would cost more than it."""
MAX_UNREAD = 10_000
"""Messages that wait at each end of a connection; beyond, the publisher drops what comes."""
_log = logging.getLogger(__name__)
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_PUB_MAX_BYTES_IN = 512
"""A subscription is a topic; anything larger is an attack on the publisher's memory."""


class PubPort:
    """A publisher of batches by topic; slow subscribers lose frames, the publisher never waits."""

    def __init__(
        self, endpoint: str, doorway: Doorway | None = None, *, is_unsafe: bool = False
    ) -> None:
        """Listen; with a `doorway` only for keys that it lets in.

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
            turnstile = SubscriptionGate(socket, doorway, self.counters)
            self.endpoint = doorway.bind(socket, endpoint)
            self._reader = Reader(socket, turnstile.read_some)
        self._admission = ConnectionLimit(socket, self.counters)
        self._outbox = TickOutbox(socket, self.counters, self._sent)

    def publish(self, topic: bytes, entry: Entry) -> None:
        """Queue for the end of this tick."""
        self._outbox.put(topic, entry)

    def publish_all(self, topic: bytes, entries: list[Entry]) -> None:
        """Queue a batch, which may be empty; the list is the port's from now on."""
        self._outbox.put_all(topic, entries)

    def pass_on(self, frames: Sequence[zmq.Frame]) -> None:
        """Forward another publisher's message unchanged: topic, batch and body frame."""
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
            clients: whose rows; empty: everybody's, as with `EVERYBODY` among them.
            dialer: the keys to connect with.
        """
        self.counters = PortCounters()
        self._dialer = dialer.exact if dialer is not None else None
        socket = new_socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        for client in clients or [EVERYBODY]:
            if client == EVERYBODY:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                continue
            socket.setsockopt(zmq.SUBSCRIBE, topic_of(client))
            if dialer is not None:
                socket.setsockopt(zmq.SUBSCRIBE, claim_of(client))
        self._socket = socket
        self._read = reading(socket, self.counters)
        self._reader = Reader(socket, self._read_some)
        self._loop = asyncio.get_running_loop()
        self._locked: dict[str, str] = {}
        """Address -> endpoint of the publishers that look at our key."""
        self._unreached: dict[str, asyncio.TimerHandle] = {}
        """Address of each publisher that has not shaken hands yet -> when that is reported."""
        self._turned_away: set[str] = set()
        """Those among them that answered, and did not let us in."""
        events = int(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED) | _REFUSED
        self._monitor = Monitor(socket, events, self._hear_of_links)

    @property
    def n_unreached(self) -> int:
        """Publishers that have not shaken hands yet, nor been reported as out of reach."""
        return len(self._unreached)

    def connect(self, endpoint: str) -> None:
        """Listen to one more publisher."""
        address = endpoint
        if self._dialer is not None:
            address = self._dialer.dress(self._socket, endpoint)
            self._locked[address] = endpoint
        if address not in self._unreached:
            timer = self._loop.call_later(UNREACHED_S, self._report, address)
            self._unreached[address] = timer
        self._open(address)

    def _open(self, address: str) -> None:
        allow_v6(self._socket, address)
        self._socket.connect(address)
        self._reader.kick()

    def disconnect(self, endpoint: str) -> None:
        """Stop listening to a publisher; unknown ones are ignored."""
        address = endpoint.partition("#")[0]
        self._locked.pop(address, None)
        self._reached(address)
        self._drop(address)

    def _drop(self, address: str) -> None:
        try:
            self._socket.disconnect(address)
        except zmq.ZMQError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise

    def close(self) -> None:
        """Drop all subscriptions."""
        self._reader.close()
        self._locked.clear()
        for address in list(self._unreached):
            self._reached(address)
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
        for event in events:
            if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._reached(event.address)
        refused = {event.address for event in events if event.kind & _REFUSED}
        self._turned_away |= refused & self._unreached.keys()
        # libzmq never comes back after that, but the publisher may just not know our key yet.
        for address in refused & self._locked.keys():
            self._loop.call_later(KNOCK_AGAIN_S, self._knock_again, address)

    def _knock_again(self, address: str) -> None:
        endpoint = self._locked.get(address)
        if endpoint is not None and self._dialer is not None:
            self._drop(address)
            self._open(self._dialer.dress(self._socket, endpoint))

    def _reached(self, address: str) -> None:
        """Whether it can be reached is known, or no question any more."""
        timer = self._unreached.pop(address, None)
        self._turned_away.discard(address)
        if timer is not None:
            timer.cancel()

    def _report(self, address: str) -> None:
        if address in self._turned_away:
            why = "it answers, and does not let this key in; see `rolloutbus keys`"
        else:
            why = f"nobody answers there; {HOW_TO_BE_REACHED}"
        self._reached(address)
        _log.warning(
            "the token stream at %s cannot be read from this host: %s. Tokens that come there are "
            "missed until it can be; results still come, through the router",
            address,
            why,
        )


class SubPort(Subscription):
    """A SUB socket that hands each received batch to a handler."""

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


# libzmq counts messages, and one message may have 20 MiB. So large ones are handed over with a
# receipt: as long as any subscriber's queue holds one, its bytes count. Small ones are bounded by
# their number: a receipt would cost more than to send them.
SMALL_BYTES = DETACH_ABOVE_BYTES
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Of large messages, for all subscribers together: they share the memory."""
_HEADER_BYTES = 64
"""Of an entry, about."""
_LOOK_EVERY = 64
"""While there is no room, so many messages are dropped before all receipts are looked at again."""
_MORE = zmq.SNDMORE | zmq.NOBLOCK


class TapPort(PubPort):
    """Publishes batches, each under a topic of its own; it never waits."""

    def __init__(
        self,
        endpoint: str,
        doorway: Doorway | None = None,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Listen; as `PubPort`."""
        super().__init__(endpoint, doorway)
        self._max_bytes = max_waiting_bytes
        self._receipts: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._n_refused = 0
        self.waiting_bytes = 0
        """Of large messages that may still be in a queue."""

    def offer(self, topic: bytes, entries: list[Entry]) -> bool:
        """Queue one batch, which may be empty; False if it is dropped: there is no room for it."""
        size_bytes = sum(len(entry.body) + _HEADER_BYTES for entry in entries)
        if size_bytes <= SMALL_BYTES:
            self.publish_all(topic, entries)
            return True
        if size_bytes > MAX_BODY_BYTES + _HEADER_BYTES or not self._has_room(size_bytes):
            self.counters.dropped_out += len(entries)
            return False
        self._outbox.flush()  # what was queued before goes before
        self._send(topic, entries, size_bytes)
        return True

    def _send(self, topic: bytes, entries: list[Entry], size_bytes: int) -> None:
        self._socket.send(topic, _MORE)
        entry = entries[0]
        if len(entries) == 1 and len(entry.body) > DETACH_ABOVE_BYTES:
            header = msgspec.structs.replace(entry, body=NO_BODY, detached=True)
            self._socket.send(encode_batch([header]), _MORE)
            content = bytes(entry.body)
        else:
            content = encode_batch(entries)
        frame = zmq.Frame(content, track=True, copy=False)
        self._socket.send(frame, zmq.NOBLOCK, copy=False)
        assert isinstance(frame.tracker, zmq.MessageTracker)
        self._receipts.append((frame.tracker, size_bytes))
        self.waiting_bytes += size_bytes
        self.counters.frames_out += 1
        self.counters.entries_out += len(entries)
        self._sent()

    def _has_room(self, size_bytes: int) -> bool:
        receipts = self._receipts
        while receipts and receipts[0][0].done:
            self.waiting_bytes -= receipts.popleft()[1]
        if self.waiting_bytes + size_bytes <= self._max_bytes:
            self._n_refused = 0
            return True
        # The oldest may wait for one slow subscriber, and those behind it have long gone to others.
        if self._n_refused % _LOOK_EVERY == 0:
            self._receipts = deque(each for each in receipts if not each[0].done)
            self.waiting_bytes = sum(size for _, size in self._receipts)
        has_room = self.waiting_bytes + size_bytes <= self._max_bytes
        self._n_refused = 0 if has_room else self._n_refused + 1
        return has_room


# For what was recorded, which can wait: a live publisher never waits for a reader.
READ_AT_ONCE = 64
_MAX_MESSAGES = 1_000
"""That wait for one subscriber, here and again at its end."""
_MAX_BYTES_IN = 512
"""A subscription is a topic."""
_SUBSCRIBE, _CANCEL = b"\1", b"\0"


class PatientPubPort:
    """Publishes batches by topic on a local address, and counts its subscriptions."""

    def __init__(self, endpoint: str, on_subscribed: Callable[[], None]) -> None:
        """Listen; `on_subscribed` hears of each change of `n_subscriptions`.

        Raises:
            SettingsError: the address is in use or not allowed.
        """
        self.counters = PortCounters()
        self.n_subscriptions = 0
        """Live ones: of one subscriber as many as it has topics; everything is one."""
        self._on_subscribed = on_subscribed
        self._is_refused = False
        socket = new_socket(zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, _MAX_MESSAGES)
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # tells of each subscription and of each end of one
        limit_frames(socket, _MAX_BYTES_IN)
        self._socket = socket
        self.endpoint = bind_local(socket, endpoint)
        self._admission = ConnectionLimit(socket, self.counters)
        self._reader = Reader(socket, self._read_some)
        self._outbox = TickOutbox(socket, self.counters, self._reader.after_send, self._refused)

    def offer(self, topic: bytes, entries: list[Entry]) -> bool:
        """Publish one batch as one message, at once; False: a subscriber has no room for it yet.

        `topic` is not empty. Nothing was sent to anybody if it is False.
        """
        self._is_refused = False
        self._outbox.put_all(topic, list(entries))
        self._outbox.flush()
        return not self._is_refused

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop publishing; what was taken has `linger_ms` milliseconds left to get out."""
        self._reader.close()
        self._admission.close()
        self._socket.close(linger_ms)

    def _refused(self, _: bytes, __: list[Entry]) -> None:
        self._is_refused = True

    def _read_some(self) -> bool:
        for _ in range(READ_AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._count(frame.bytes)
        return True

    def _count(self, asked: bytes) -> None:
        # Who has keys asks for the name of a client besides its topic.
        if asked[:1] in (_SUBSCRIBE, _CANCEL) and not is_claim(asked[1:]):
            self.n_subscriptions += 1 if asked[:1] == _SUBSCRIBE else -1
            self._on_subscribed()


# A forwarder reads everything that is published. Its own publisher judges who may read which topic,
# like any other. Spec: docs/protocol.md, "Streams", 9.
TOPIC_BYTES = len(topic_of(""))
FRAMES = 3
"""Topic, batch and body."""


class ForwardPort:
    """Subscribed to any number of publishers, and a publisher of what they say."""

    def __init__(
        self, endpoint: str, doorway: Doorway | None = None, *, dialer: Dialer | None = None
    ) -> None:
        """Listen.

        Args:
            endpoint: where.
            doorway: the lock; None: it has none.
            dialer: the keys to connect to publishers with.

        Raises:
            SettingsError: the address is in use or not allowed.
        """
        self.down = PubPort(endpoint, doorway)
        self.endpoint = self.down.endpoint
        self.up = Subscription(self._reading, dialer=dialer)
        """Where to `connect` it."""

    def close(self) -> None:
        """Pass nothing on any more."""
        self.up.close()
        self.down.close()

    def _reading(self, socket: zmq.Socket[bytes], counters: PortCounters) -> ReadSome:
        return _Passage(socket, counters, self.down).read_some


class _Passage(Drain):
    """Passes messages on from one socket to a publisher."""

    def __init__(self, socket: zmq.Socket[bytes], counters: PortCounters, down: PubPort) -> None:
        super().__init__(socket, counters)
        self._down = down

    def _read_one(self) -> None:
        frames = [self._recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more and len(frames) < FRAMES:
            frames.append(self._recv(zmq.NOBLOCK, copy=False))
        self._is_midway = bool(frames[-1].more)
        if self._is_midway or not _is_message(frames):
            self._counters.malformed_in += 1
            return
        self._counters.frames_in += 1
        self._down.pass_on(frames)


def _is_message(frames: list[zmq.Frame]) -> bool:
    """Whether a message is of this protocol; its content is for its readers to check."""
    is_topic = len(frames[0].buffer) == TOPIC_BYTES
    return is_topic and len(frames) > 1 and bytes(frames[1].buffer[: len(SIGNATURE)]) == SIGNATURE
