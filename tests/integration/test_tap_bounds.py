"""What waits for a tap's slow readers is bounded in bytes, and what they miss shows."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from rolloutbus.bus.transport.zmq_sockets import new_socket
from rolloutbus.bus.transport.zmq_topics import SubPort, TapPort
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES
from rolloutbus.bus.wire.entry import Entry
from tests.integration.live_fleet import DEADLINE_S, PACE_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ANY = "tcp://127.0.0.1:0"
MIB = 1024 * 1024
MAX_BYTES = 8 * MIB
MAX_MESSAGES = 1_000
"""A thousand MiB, far more than sockets of the system hold."""


def message(size_bytes: int) -> list[Entry]:
    return [Entry("finished", "c/1", body=msgspec.Raw(msgspec.msgpack.encode(bytes(size_bytes))))]


@asynccontextmanager
async def tap() -> AsyncGenerator[TapPort]:
    port = TapPort(ANY, max_waiting_bytes=MAX_BYTES)
    yield port
    port.close()


class Reader:
    """Reads a tap, and knows what it has heard."""

    def __init__(self, port: TapPort) -> None:
        self.heard: list[bytes] = []
        self._changes = asyncio.Event()
        self._port = SubPort(self._take)
        self._port.connect(port.endpoint)

    async def hears(self, port: TapPort, topic: bytes) -> None:
        """Publish until it comes: a subscription takes effect some time after it is made."""
        async with asyncio.timeout(DEADLINE_S):
            while topic not in self.heard:
                port.offer(topic, [])
                self._changes.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PACE_S):
                        await self._changes.wait()

    def close(self) -> None:
        self._port.close()

    def _take(self, topic: bytes, _: list[Entry]) -> None:
        self.heard.append(topic)
        self._changes.set()


async def test_a_reader_that_does_not_read_cannot_fill_the_memory_of_a_router() -> None:
    async with tap() as port:
        deaf = new_socket(zmq.SUB)
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.connect(port.endpoint)
        async with asyncio.timeout(DEADLINE_S):
            while not deaf.poll(0):  # it is there, and reads nothing from now on
                port.offer(b"first", [])
                await asyncio.sleep(PACE_S)  # it takes a moment to subscribe
        n_taken = 0
        while port.offer(b"large %d" % n_taken, message(MIB)):
            n_taken += 1
            assert n_taken < MAX_MESSAGES
            assert port.waiting_bytes <= MAX_BYTES + MIB
            await asyncio.sleep(0)  # what was sent is noticed in turns of the loop
        assert port.counters.dropped_out == 1
        assert port.offer(b"small", message(100))
        deaf.close()
        # What waited for it is free again once it is gone.
        async with asyncio.timeout(DEADLINE_S):
            while not port.offer(b"again", message(MIB)):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(PACE_S)


async def test_a_reader_that_keeps_up_gets_everything_in_order() -> None:
    sizes = [0, 100, DETACH_ABOVE_BYTES + 1, 10, 3 * MIB, 0, DETACH_ABOVE_BYTES, 200]
    async with tap() as port:
        reader = Reader(port)
        await reader.hears(port, b"first")
        for number, size_bytes in enumerate(sizes):
            assert port.offer(b"%d" % number, message(size_bytes))
        await reader.hears(port, b"last")
        topics = [topic for topic in reader.heard if topic.isdigit()]
        assert topics == [b"%d" % number for number in range(len(sizes))]
        reader.close()


async def test_many_entries_that_are_large_together_count_as_well() -> None:
    async with tap() as port:
        reader = Reader(port)
        await reader.hears(port, b"first")
        entries = [each for _ in range(64) for each in message(1000)]
        assert port.offer(b"many", entries)
        assert port.waiting_bytes > 64_000
        await reader.hears(port, b"last")
        assert b"many" in reader.heard
        reader.close()
