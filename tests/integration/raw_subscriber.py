"""Plain SUB sockets: the frames of each message as received, and as a recording has them."""

import asyncio
import math
from pathlib import Path

import msgspec
import zmq

from rolloutbus import RolloutClient
from rolloutbus.bus.streams.tap import TapMark
from rolloutbus.bus.transport.zmq_batches import Reader
from rolloutbus.bus.transport.zmq_sockets import new_socket
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES, encode_batch
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Stream, Tap
from rolloutbus.replay.player import Player, PlayerSettings
from rolloutbus.replay.player_core import THE_TAP
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import DEADLINE_S

Frames = list[bytes]


class RawSubscriber:
    """Receives everything that one publisher sends."""

    def __init__(self, endpoint: str, topic: bytes = b"") -> None:
        self.messages: list[Frames] = []
        self._changes = asyncio.Event()
        self._socket = new_socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._reader = Reader(self._socket, self._read_some)

    async def has_received(self, n_messages: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.messages) < n_messages:
                self._changes.clear()
                await self._changes.wait()

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _read_some(self) -> bool:
        try:
            self.messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return False
        self._changes.set()
        return True


def frames_of_message(topic: bytes, entries: list[Entry]) -> Frames:
    """What a publisher sends."""
    body = entries[0].body if len(entries) == 1 else b""
    if len(body) <= DETACH_ABOVE_BYTES:
        return [topic, encode_batch(entries)]
    head = msgspec.structs.replace(entries[0], body=NO_BODY, detached=True)
    return [topic, encode_batch([head]), bytes(body)]


def messages_in(journal: Path) -> dict[str, list[Frames]]:
    """Publisher -> what it must send in a replay."""
    found: dict[str, list[Frames]] = {}
    for record in Journal(journal):
        if isinstance(record, Stream):
            frames = frames_of_message(record.topic, record.entries)
            found.setdefault(record.entries[0].route, []).append(frames)
        elif isinstance(record, Tap):
            mark = TapMark(record.event, record.n, record.router_at, record.connection, record.name)
            found.setdefault(THE_TAP, []).append(frames_of_message(mark.topic, record.entries))
    return found


async def received_in_replay(journal: Path, n_subscribers: int) -> dict[str, list[list[Frames]]]:
    """Worker -> what each of so many subscribers received of it, at the highest speed."""
    expected = messages_in(journal)
    async with (
        Player(Journal(journal), PlayerSettings(speed=math.inf)) as player,
        RolloutClient(ClientSettings(name="listener", router=player.address)) as client,
    ):
        streams = {member.name: member.stream for member in client.connection.members}
        subscribers = {
            name: [RawSubscriber(each) for _ in range(n_subscribers)]
            for name, each in streams.items()
        }
        try:
            async with asyncio.timeout(DEADLINE_S):
                await player.subscribed(n_subscribers + 1)  # and the client, to rows of its own
                await player.play()
            for name, of_one in subscribers.items():
                for subscriber in of_one:
                    await subscriber.has_received(len(expected[name]))
        finally:
            for of_one in subscribers.values():
                for subscriber in of_one:
                    subscriber.close()
    return {
        name: [subscriber.messages for subscriber in of_one] for name, of_one in subscribers.items()
    }
