"""What schedulers tell is heard from each, in order, also once nobody else can find the way in."""

import queue
import socket
import threading
from pathlib import Path

import pytest

from rolloutbus.engine_worker.engines.sglang.schedulers.connection import UNKNOWN, TapListener
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    CacheFlushed,
    Message,
    Ready,
    SchedulerRank,
    framed,
)
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def unconnected() -> socket.socket:
    """Of a scheduler that starts."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def test_connected_schedulers_are_heard_after_the_path_is_gone() -> None:
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    gone = threading.Event()
    taps = TapListener(lambda message, _: heard.put(message), gone.set)
    with unconnected() as one, unconnected() as late:
        one.connect(taps.path)
        taps.hide()
        assert not Path(taps.path).parent.exists()
        with pytest.raises(FileNotFoundError):
            late.connect(taps.path)
        for n in range(3):
            one.sendall(framed(CacheFlushed(n)))
        assert [heard.get(timeout=DEADLINE_S) for _ in range(3)] == [
            CacheFlushed(n) for n in range(3)
        ]
        assert not gone.is_set()
    assert gone.wait(DEADLINE_S)
    taps.close()


def test_what_a_scheduler_tells_comes_with_its_rank_once_it_is_ready() -> None:
    heard: queue.SimpleQueue[tuple[Message, SchedulerRank]] = queue.SimpleQueue()
    taps = TapListener(lambda message, rank: heard.put((message, rank)), lambda: None)
    ranks = [SchedulerRank(dp, 0, tp) for dp in range(2) for tp in range(2)]
    for rank in ranks:
        with unconnected() as one:
            one.connect(taps.path)
            for message in (CacheFlushed(1), Ready(rank, 100, 90), CacheFlushed(2)):
                one.sendall(framed(message))
            told = [heard.get(timeout=DEADLINE_S) for _ in range(3)]
        assert told == [
            (CacheFlushed(1), UNKNOWN),
            (Ready(rank, 100, 90), rank),
            (CacheFlushed(2), rank),
        ]
    taps.close()


def test_nobody_accepts_for_a_listener_that_is_closed() -> None:
    before = {*threading.enumerate()}
    taps = TapListener(lambda _message, _rank: None, lambda: None)
    with unconnected() as one:
        one.connect(taps.path)
        taps.close()
        left = {thread.name for thread in {*threading.enumerate()} - before}
    assert "sglang-taps" not in left
