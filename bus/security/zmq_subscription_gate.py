"""The subscriptions at a guarded publisher: each one is granted or not, by the key that asks.

libzmq hands them over one by one (ZMQ_XPUB_MANUAL), and a grant goes to the connection whose
subscription was read last. It counts wrong when a subscriber sends a message, which no honest one
does: from then on, until all is read, a grant would go to somebody else's connection.
"""

import zmq

from rolloutbus.bus.security.topics import granted, is_claim
from rolloutbus.bus.security.zmq_guard import Doorway
from rolloutbus.bus.transport.ports import PortCounters
from rolloutbus.bus.transport.zmq_connections import Wire, hang_up, wire_of

MAX_ASKED = 1_000
"""Subscriptions of one connection. One that asks on and on would fill the publisher's memory."""
READ_AT_ONCE = 64

_SUBSCRIBE, _CANCEL = b"\1", b"\0"


class SubscriptionGate:
    """Reads what subscribers of one XPUB socket ask for."""

    def __init__(self, socket: zmq.Socket[bytes], doorway: Doorway, counters: PortCounters) -> None:
        """Before the socket is bound."""
        socket.setsockopt(zmq.XPUB_MANUAL, 1)
        self._socket = socket
        self._doorway = doorway
        self._counters = counters
        self._is_miscounted = False
        self._n_asked: dict[int, tuple[Wire, int]] = {}
        """Descriptor -> which connection that is, and how often it asked."""

    def read_some(self) -> bool:
        """Judge some of what waits; True if there may be more."""
        for _ in range(READ_AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._is_miscounted = False
                return False
            self._judge(frame)
        return True

    def _judge(self, frame: zmq.Frame) -> None:
        asked = frame.bytes
        if frame.more or asked[:1] not in (_SUBSCRIBE, _CANCEL):
            self._is_miscounted = True
        if self._is_miscounted:
            # The guilty one must go, and whoever came meanwhile will come again.
            self._counters.malformed_in += 1
            self._turn_out(wire_of(frame))
            return
        principal = self._doorway.guard.signer(frame)
        wire = self._doorway.note(frame)
        if principal is None or wire is None:  # also how libzmq tells that a connection has ended
            return
        if self._counted(wire) > MAX_ASKED:
            self._turn_out(wire)
            return
        topic = granted(principal, asked[1:])
        if topic is None:
            self._counters.foreign_in += is_claim(asked[1:])
        elif asked[:1] == _SUBSCRIBE:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        else:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic)

    def _counted(self, wire: Wire) -> int:
        known, n_before = self._n_asked.get(wire.fd, (wire, 0))
        n = n_before + 1 if known == wire else 1
        self._n_asked[wire.fd] = (wire, n)
        return n

    def _turn_out(self, wire: Wire | None) -> None:
        if wire is not None:
            hang_up(wire)
