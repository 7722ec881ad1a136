"""A publisher that keeps a message back until every subscriber has room for it.

For what was recorded, which can wait: a live publisher never waits for a reader.
"""

from collections.abc import Callable

import zmq

from rolloutbus.bus.security.topics import is_claim
from rolloutbus.bus.transport.ports import PortCounters
from rolloutbus.bus.transport.zmq_admission import Admission
from rolloutbus.bus.transport.zmq_sockets import (
    Reader,
    TickOutbox,
    bind_local,
    limit_frames,
    new_socket,
)
from rolloutbus.bus.wire.entry import Entry

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
        self._admission = Admission(socket, self.counters)
        self._reader = Reader(socket, self._read_some)
        self._outbox = TickOutbox(socket, self.counters, self._reader.after_send, self._refused)

    def offer(self, topic: bytes, entries: list[Entry]) -> bool:
        """Publish one batch as one message, at once; False: somebody has no room for it yet.

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
