"""Events that a foreign program publishes over ZeroMQ are heard in order, and nobody else's."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from rolloutbus.bus.transport.zmq_sockets import EventFeed, own_context
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.engine_worker.engines.sglang.prefixes import PrefixFeed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

DEADLINE_S = 30.0
N_MESSAGES = 200
N_DEAF = 3
"""Flushes from the one on with which there is a publisher."""


class Heard:
    """What came, and a wait for a number of messages."""

    def __init__(self) -> None:
        self.messages: list[Sequence[bytes]] = []
        self._changed = threading.Condition()

    def __call__(self, frames: Sequence[bytes]) -> None:
        with self._changed:
            self.messages.append(frames)
            self._changed.notify()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, DEADLINE_S)


def publisher(endpoint: str) -> zmq.Socket[bytes]:
    """One that has a subscriber."""
    socket = own_context().socket(zmq.XPUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    assert socket.poll(int(DEADLINE_S * 1000))
    assert socket.recv() == b"\x01"
    return socket


def test_a_publisher_that_comes_later_is_heard(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint, heard = f"ipc://{tmp_path}/events", Heard()
    feed = EventFeed(endpoint, heard)
    with publisher(endpoint) as socket:
        for n in range(N_MESSAGES):
            socket.send_multipart([b"", n.to_bytes(8, "big"), b"payload"])
        heard.wait_for(N_MESSAGES)
    assert [int.from_bytes(frames[1], "big") for frames in heard.messages] == [*range(N_MESSAGES)]
    feed.close()


def test_a_closed_feed_leaves_no_thread(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    before = set(threading.enumerate())
    EventFeed(f"ipc://{tmp_path}/events", Heard()).close()
    assert set(threading.enumerate()) <= before


def test_a_place_where_others_could_publish_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for endpoint in (f"ipc://{tmp_path}/events", "tcp://192.0.2.1:5557"):
        with pytest.raises(SettingsError):
            EventFeed(endpoint, Heard())


def test_an_engine_serves_once_its_events_are_heard(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    arguments: dict[str, object] = {}
    feed = PrefixFeed.among(arguments, tmp_path)
    endpoint = json.loads(str(arguments["kv_events_config"]))["endpoint"]
    cleared = msgspec.msgpack.encode([0.5, [["AllBlocksCleared"]], 0])
    n_flushes = 0
    with own_context().socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)

        def flush() -> None:
            nonlocal n_flushes
            n_flushes += 1
            if n_flushes == N_DEAF:
                socket.bind(endpoint)
            if n_flushes >= N_DEAF:
                socket.send_multipart([b"", n_flushes.to_bytes(8, "big"), cleared])

        feed.meet(flush)
    assert n_flushes >= N_DEAF
    feed.close()
