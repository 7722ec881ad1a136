"""Addresses that cannot be reached: who connects there says so, with what to do."""

import asyncio
import logging
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.transport.zmq_topics import PubPort, SubPort
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.bus.wire.messages.weights import PullManifest
from tests.integration.live_fleet import DEADLINE_S, Changes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SOON_S = 0.05
PACE_S = 0.01


@contextmanager
def held_endpoint() -> Generator[str]:
    """An endpoint at which nobody listens, nor can begin to."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{holder.getsockname()[1]}"


@pytest.fixture
def nowhere() -> Iterator[str]:
    with held_endpoint() as endpoint:
        yield endpoint


class Said(logging.Handler):
    """What is logged by the code of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._changes = Changes()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._changes.notify()

    async def first(self) -> str:
        await self._changes.until(lambda: bool(self.lines))
        return self.lines[0]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    handler = Said()
    logger = logging.getLogger("rolloutbus.bus.transport.zmq_topics")
    monkeypatch.setattr(logger, "handlers", [handler])
    return handler


def ignore(_: bytes, __: list[Entry]) -> None:
    """Takes what is published."""


async def test_a_reader_says_which_stream_it_cannot_reach_and_what_to_do(
    nowhere: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutbus.bus.transport.zmq_topics.UNREACHED_S", SOON_S)
    port = SubPort(ignore)
    try:
        port.connect(nowhere)
        line = await said.first()
    finally:
        port.close()
    assert nowhere in line
    assert "--advertise" in line
    assert "through the router" in line


async def test_a_reader_that_reaches_a_stream_or_leaves_it_says_nothing(
    nowhere: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = PubPort("tcp://127.0.0.1:0")
    port = SubPort(ignore)
    try:
        monkeypatch.setattr("rolloutbus.bus.transport.zmq_topics.UNREACHED_S", DEADLINE_S)
        port.connect(publisher.endpoint)
        async with asyncio.timeout(DEADLINE_S):
            while port.n_unreached:  # noqa: ASYNC110 - nobody tells of a handshake
                await asyncio.sleep(PACE_S)
        monkeypatch.setattr("rolloutbus.bus.transport.zmq_topics.UNREACHED_S", SOON_S)
        port.connect(nowhere)
        port.disconnect(nowhere)
        with held_endpoint() as later:
            port.connect(later)
            assert later in await said.first()  # after the time of the one that was left
    finally:
        port.close()
        publisher.close()
    assert len(said.lines) == 1


async def test_a_store_that_never_answers_is_given_up_with_its_address(
    nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutbus.bus.transport.bulk.UNREACHED_S", SOON_S)
    async with BulkLink(nowhere) as link, asyncio.timeout(DEADLINE_S):
        with pytest.raises(PeerLost, match="cannot be reached from this host") as caught:
            await link.ask("pull_manifest", PullManifest("default", 1))
    assert nowhere in str(caught.value)
