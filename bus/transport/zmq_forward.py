"""What publishers say, published again at one address: frames pass as they are, rights hold.

It reads everything that is published and says nothing itself. Who may read which topic is judged
at its own publisher, as at any other. Spec: docs/protocol.md, "Streams", 9.
"""

import zmq

from rolloutbus.bus.security.zmq_dialer import Dialer
from rolloutbus.bus.security.zmq_guard import Doorway
from rolloutbus.bus.transport.ports import PortCounters
from rolloutbus.bus.transport.zmq_sockets import DRAIN_MESSAGES, SKIP_FRAMES
from rolloutbus.bus.transport.zmq_topics import PubPort, ReadSome, Subscription
from rolloutbus.bus.wire.codec import SIGNATURE, topic_of

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


class _Passage:
    """From one socket to the other."""

    def __init__(self, socket: zmq.Socket[bytes], counters: PortCounters, down: PubPort) -> None:
        self._recv = socket.recv
        self._counters = counters
        self._down = down
        self._is_midway = False
        """The rest of an overlong message comes next."""

    def read_some(self) -> bool:
        """Pass some on; True if there may be more."""
        try:
            if self._is_midway:
                self._skip()
                return True
            for _ in range(DRAIN_MESSAGES):
                self._pass_one()
                if self._is_midway:
                    return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.ENOTSOCK, zmq.ETERM):
                return False
            raise
        return True

    def _pass_one(self) -> None:
        frames = [self._recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more and len(frames) < FRAMES:
            frames.append(self._recv(zmq.NOBLOCK, copy=False))
        self._is_midway = bool(frames[-1].more)
        if self._is_midway or not _is_message(frames):
            self._counters.malformed_in += 1
            return
        self._counters.frames_in += 1
        self._down.pass_on(frames)

    def _skip(self) -> None:
        for _ in range(SKIP_FRAMES):
            if not self._recv(zmq.NOBLOCK, copy=False).more:
                self._is_midway = False
                break


def _is_message(frames: list[zmq.Frame]) -> bool:
    """Whether it is of this protocol; what it says is for its readers to judge."""
    is_topic = len(frames[0].buffer) == TOPIC_BYTES
    return is_topic and len(frames) > 1 and bytes(frames[1].buffer[: len(SIGNATURE)]) == SIGNATURE
