"""A patient publisher loses nothing: it waits for whoever has no room."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from rolloutbus.bus.transport.zmq_sockets import new_socket
from rolloutbus.bus.transport.zmq_topics import PatientPubPort
from rolloutbus.bus.wire.codec import pack, topic_of
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.generation import Idle
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.raw_subscriber import RawSubscriber, frames_of_message

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TOPIC = topic_of("c")
PACE_S = 0.001


class Publisher:
    """A patient publisher, and news of its subscriptions."""

    def __init__(self, directory: Path) -> None:
        self._changes = asyncio.Event()
        self.port = PatientPubPort(f"ipc://{directory}/p", self._changes.set)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():
                self._changes.clear()
                await self._changes.wait()

    async def has(self, n_subscriptions: int) -> None:
        await self.until(lambda: self.port.n_subscriptions == n_subscriptions)


def message(n: int) -> list[Entry]:
    return [Entry("idle", route="w0", body=pack(Idle([f"c/{n}"] * 100, [(1, 1)] * 100, [n] * 100)))]


def fill(port: PatientPubPort, n: int = 0) -> int:
    """Publish messages from number n on until somebody has no room; returns how many there are."""
    while port.offer(TOPIC, message(n)):
        n += 1
    return n


async def test_what_a_slow_subscriber_has_no_room_for_is_kept_back_and_nobody_loses_any(
    tmp_path: Path,
) -> None:
    publisher = Publisher(tmp_path)
    slow = new_socket(zmq.SUB)
    slow.setsockopt(zmq.SUBSCRIBE, b"")
    slow.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
    slow.connect(publisher.port.endpoint)
    quick = RawSubscriber(publisher.port.endpoint)
    await publisher.has(2)

    n_taken, n_before = fill(publisher.port), 0
    while n_taken > n_before:  # nobody read meanwhile: the quick one had no room either
        await quick.has_received(n_taken)
        n_taken, n_before = fill(publisher.port, n_taken), n_taken
    heard = [slow.recv_multipart() for _ in range(n_taken)]
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if publisher.port.offer(TOPIC, message(n_taken)):
                break
            await asyncio.sleep(PACE_S)  # it does not tell when there is room
    heard.append(slow.recv_multipart())
    await quick.has_received(n_taken + 1)

    expected = [frames_of_message(TOPIC, message(n)) for n in range(n_taken + 1)]
    assert heard == quick.messages == expected
    quick.close()
    slow.close()
    publisher.port.close()


async def test_a_subscriber_that_goes_away_holds_nobody_up(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    stuck = new_socket(zmq.SUB)
    stuck.setsockopt(zmq.SUBSCRIBE, b"")
    stuck.connect(publisher.port.endpoint)
    await publisher.has(1)
    n_taken = fill(publisher.port)
    stuck.close()
    await publisher.has(0)
    assert publisher.port.offer(TOPIC, message(n_taken))
    publisher.port.close()


async def test_subscriptions_are_counted_one_by_one(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    subscribers = [RawSubscriber(publisher.port.endpoint, topic) for topic in (b"", b"", TOPIC)]
    await publisher.has(3)
    subscribers.pop().close()
    subscribers.pop().close()
    await publisher.has(1)
    subscribers.pop().close()
    await publisher.has(0)
    publisher.port.close()


async def test_nobody_beyond_this_machine_can_listen() -> None:
    with pytest.raises(SettingsError):
        PatientPubPort("tcp://0.0.0.0:0", lambda: None)
