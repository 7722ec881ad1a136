"""Batches of entries through ZeroMQ sockets: the drain loop and the flush of each loop tick.

One pyzmq call costs more than all Python work on an entry, so entries queue per destination and
leave once per loop tick as one frame, and sockets are read through their file descriptor without
`zmq.asyncio`. `ZMQ_FD` is edge-triggered and a send may consume the edge: after each flush the
socket's events are looked at again.
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from rolloutbus.bus.transport.ports import PeerBatchHandler, PortCounters, TopicBatchHandler
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES, decode_batch, encode_batch, frames_of
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES, MAX_FRAMES

DRAIN_MESSAGES = 64
"""Messages read before other callbacks get a turn."""
FEW_ENTRIES = 64
"""The same in entries, of a socket that was empty: what they lead to leaves before more is read, so
peers work meanwhile, and none waits for the others to have done all of theirs."""
MANY_ENTRIES = 128
"""The same of a socket that has more each time: frames that are fuller cost less for each entry."""
_NOW = int(zmq.DONTWAIT)
_MORE = int(zmq.SNDMORE) | _NOW
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
# Plain numbers, because `zmq.SNDMORE | zmq.DONTWAIT` on the enumerations takes as long as a send.
SKIP_FRAMES = 512
"""Frames of an overlong message that are thrown away before other callbacks get a turn."""
PENDING_ENTRIES = 100_000
"""A link that cannot send keeps this many entries; more are dropped (their senders re-send)."""


class Reader:
    """Drains one socket whenever it has something, a bounded number of messages at a time."""

    def __init__(self, socket: zmq.Socket[bytes], on_readable: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        # The C method: pyzmq's Python layer around it doubles the price of a call.
        self._get = zmq.backend.Socket.get.__get__(socket)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._read_some = on_readable
        self._is_scheduled = False
        self._is_closed = False
        self._loop.add_reader(self._fd, self._drain)
        self.kick()

    def kick(self) -> None:
        """Look at the socket again in the next tick: an edge may have been consumed."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._scheduled)

    def after_send(self) -> None:
        """A send may have swallowed the readable edge."""
        if self._is_closed:
            return
        if not self._is_scheduled and self._get(_EVENTS) & _READABLE:
            self.kick()

    def close(self) -> None:
        """Stop reading; the socket stays its owner's to close."""
        if not self._is_closed:  # later the descriptor may be another socket's
            self._is_closed = True
            self._loop.remove_reader(self._fd)

    def _scheduled(self) -> None:
        self._is_scheduled = False
        self._drain()

    def _drain(self) -> None:
        if not self._is_closed and self._read_some():
            self.kick()


class Drain:
    """Reads messages of one socket, a bounded number at a time."""

    def __init__(self, socket: zmq.Socket[bytes], counters: PortCounters) -> None:
        self._recv = socket.recv
        self._counters = counters
        self._is_midway = False
        """The rest of an overlong message comes next."""
        self._enough = FEW_ENTRIES
        """Doubles each time that there may be more."""

    def read_some(self) -> bool:
        """Read up to DRAIN_MESSAGES, or about FEW_ENTRIES to MANY_ENTRIES; True: maybe not all."""
        enough = self._counters.entries_in + self._enough
        self._enough = min(2 * self._enough, MANY_ENTRIES)
        try:
            if self._is_midway:
                self._skip()
                return True
            for _ in range(DRAIN_MESSAGES):
                if self._counters.entries_in >= enough:
                    return True
                self._read_one()
                if self._is_midway:
                    return True
        except zmq.Again:
            self._enough = FEW_ENTRIES
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.ENOTSOCK, zmq.ETERM):
                return False
            raise
        return True

    def _read_one(self) -> None:
        """Read one message; sets `_is_midway` if not to its end."""
        raise NotImplementedError

    def _skip(self) -> None:
        """Throw away some of an overlong message, which is all here, or it would not be offered."""
        for _ in range(SKIP_FRAMES):
            if not self._recv(_NOW, copy=False).more:
                self._is_midway = False
                break


class Receiver(Drain):
    """Reads messages [prefix frame] batch [body] from one socket."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        counters: PortCounters,
        deliver: PeerBatchHandler | TopicBatchHandler,
        *,
        has_prefix: bool,
        on_malformed: Callable[[bytes], None] | None = None,
        admits: Callable[[bytes, zmq.Frame], bool] | None = None,
    ) -> None:
        super().__init__(socket, counters)
        self._admits = admits
        """Whether a message from there may be read at all, by its frame's `User-Id`."""
        self._on_malformed = on_malformed
        """Told who sent a message that broke the protocol."""
        self._deliver: Callable[[bytes, list[Entry]], None] = deliver  # type: ignore[assignment]
        self._has_prefix = has_prefix

    def _read_one(self) -> None:
        prefix = self._recv(_NOW) if self._has_prefix else b""
        frame = self._recv(_NOW, copy=False)
        body: zmq.Frame | None = None
        n_extra = 0
        more = frame.more
        while more:
            body = self._recv(_NOW, copy=False)
            n_extra += 1
            more = body.more
            if more and n_extra == MAX_FRAMES:
                self._is_midway, more = True, False
        counters = self._counters
        if self._admits is not None and not self._admits(prefix, frame):
            counters.foreign_in += 1
            return
        try:
            entries = decode_batch(frame.buffer)
            if n_extra or (len(entries) == 1 and entries[0].detached):
                entries = [_attach(entries, body, n_extra)]
        except RemoteProtocolError:
            counters.malformed_in += 1
            if self._on_malformed is not None:
                self._on_malformed(prefix)
            return
        counters.frames_in += 1
        counters.entries_in += len(entries)
        self._deliver(prefix, entries)


def _attach(entries: list[Entry], body: zmq.Frame | None, n_extra: int) -> Entry:
    if n_extra != 1 or body is None or len(entries) != 1 or not entries[0].detached:
        msg = "a body frame must follow exactly the one entry that announces it"
        raise RemoteProtocolError(msg)
    if len(body) > MAX_BODY_BYTES:
        raise RemoteProtocolError(f"a body of {len(body)} bytes; {MAX_BODY_BYTES} are allowed")
    return msgspec.structs.replace(entries[0], body=msgspec.Raw(body.buffer), detached=False)


class TickOutbox:
    """Entries waiting for the end of the tick, per destination, and their way out."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        counters: PortCounters,
        after_flush: Callable[[], None],
        on_undelivered: Callable[[bytes, list[Entry]], None] | None = None,
    ) -> None:
        """`on_undelivered` hears what one peer of many, gone or full, was not sent."""
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._send = zmq.backend.Socket.send.__get__(socket)
        self._counters = counters
        self._after_flush = after_flush
        self._on_undelivered = on_undelivered
        self._queues: dict[bytes, list[Entry]] = {}
        self._is_scheduled = False

    def put(self, destination: bytes, entry: Entry) -> None:
        """Queue for the end of this loop tick."""
        queue = self._queues.get(destination)
        if queue is None:
            self._queues[destination] = [entry]
        else:
            queue.append(entry)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.flush)

    def put_all(self, destination: bytes, entries: list[Entry]) -> None:
        """Queue several; the list is the outbox's from now on."""
        queue = self._queues.get(destination)
        if queue is None:
            self._queues[destination] = entries
        else:
            queue += entries
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.flush)

    def clear(self) -> None:
        """Drop everything queued."""
        self._queues.clear()

    @property
    def has_waiting(self) -> bool:
        """Entries could not leave yet."""
        return bool(self._queues)

    def flush(self) -> None:
        """Send what waits, now."""
        self._is_scheduled = False
        queues, self._queues = self._queues, {}
        for destination, entries in queues.items():
            n_sent = self._send_all(destination, entries)
            if n_sent < len(entries):
                self._stuck(destination, entries[n_sent:])
        self._after_flush()
        self._retry_if_writable()

    def _retry_if_writable(self) -> None:
        """Reading the events may have swallowed the edge that a link coming up makes."""
        if not self._queues or self._is_scheduled or self._socket.closed:
            return
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:  # type: ignore[arg-type]
            self._is_scheduled = True
            self._loop.call_soon(self.flush)

    def _stuck(self, destination: bytes, entries: list[Entry]) -> None:
        if destination:  # one peer of many is gone or full: the sender's resends will tell
            self._counters.dropped_out += len(entries)
            if self._on_undelivered is not None:
                self._on_undelivered(destination, entries)
            return
        self._counters.dropped_out += max(0, len(entries) - PENDING_ENTRIES)
        self._queues[destination] = entries[:PENDING_ENTRIES]

    def _send_all(self, destination: bytes, entries: list[Entry]) -> int:
        """Send; returns how many entries the socket took."""
        n_sent = 0
        counters = self._counters
        for batch in frames_of(entries):
            try:
                self._send_batch(destination, batch)
            except zmq.ZMQError as error:
                if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                    return n_sent
                raise
            n_sent += len(batch)
            counters.frames_out += 1
            counters.entries_out += len(batch)
        return n_sent

    def _send_batch(self, destination: bytes, batch: list[Entry]) -> None:
        is_detached = len(batch) == 1 and len(batch[0].body) > DETACH_ABOVE_BYTES
        if not is_detached:
            if destination:
                self._send(destination, _MORE)
            self._send(encode_batch(batch), _NOW)
            return
        entry = batch[0]
        if len(entry.body) > MAX_BODY_BYTES:
            self._counters.dropped_out += 1  # it would end the link, and all else that is under way
            return
        if destination:
            self._send(destination, _MORE)
        self._send(
            encode_batch([msgspec.structs.replace(entry, body=NO_BODY, detached=True)]), _MORE
        )
        self._send(bytes(entry.body), _NOW, copy=False)
