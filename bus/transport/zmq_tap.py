"""A publisher whose subscribers' backlog is bounded in bytes, not only in messages.

libzmq counts messages, and a message of ours may have 20 MiB. So large ones are handed over with a
receipt: as long as any subscriber's queue holds one, its bytes count. Small ones are bounded by
their number: a receipt would cost more than to send them.
"""

from collections import deque

import msgspec
import zmq

from rolloutbus.bus.security.zmq_guard import Doorway
from rolloutbus.bus.transport.zmq_topics import PubPort
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES, encode_batch
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES

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
