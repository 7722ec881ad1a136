"""A router's tap: whom it lets in, and what it costs when nobody reads it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.streams.tap import TapMark, mark_in
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.transport.zmq_sockets import Monitor, new_socket
from rolloutbus.bus.transport.zmq_topics import SubPort
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import Hello
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ANY = "tcp://127.0.0.1:0"


@asynccontextmanager
async def tapped_router(security: SecuritySettings | None = None) -> AsyncGenerator[RouterActor]:
    async with RouterActor(RouterSettings(ANY, ANY, tap=ANY, security=security), "r") as router:
        yield router


class Reader:
    """A subscriber of a tap."""

    def __init__(self, router: RouterActor, security: SecuritySettings | None = None) -> None:
        self.heard: list[tuple[TapMark, list[Entry]]] = []
        self._changes = asyncio.Event()
        self._port = SubPort(self._take, dialer=dialer_of(security))
        self._port.connect(router.tap)

    async def first(self, is_it: Callable[[TapMark, list[Entry]], bool]) -> list[Entry]:
        """The entries of the first message that is it."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for mark, entries in self.heard:
                    if is_it(mark, entries):
                        return entries
                self._changes.clear()
                await self._changes.wait()

    async def tick(self) -> None:
        """Wait until it is subscribed."""
        await self.first(lambda mark, _: mark.event == "tick")

    def close(self) -> None:
        self._port.close()

    def _take(self, topic: bytes, entries: list[Entry]) -> None:
        self.heard.append((mark_in(topic), entries))
        self._changes.set()


async def test_a_reader_hears_ticks_and_whatever_is_said_large_bodies_too() -> None:
    async with tapped_router() as router:
        reader = Reader(router)
        await reader.tick()
        link = DealerPort(router.endpoints[0], lambda _: None)
        hello = Entry("hello", body=pack(Hello("client", "c", "f" * 32)))
        large = Entry("abort", "c/1", deadline_ms=1000, body=pack(Abort([f"c/{10**9}"] * 5_000)))
        link.send(hello)
        link.send(large)
        said = await reader.first(lambda mark, _: (mark.event, mark.name) == ("received", "c"))
        assert said == [hello]
        answered = await reader.first(lambda mark, _: (mark.event, mark.name) == ("sent", "c"))
        assert [entry.kind for entry in answered] == ["welcome"]
        (kept,) = await reader.first(lambda _, entries: [e.kind for e in entries] == ["abort"])
        assert bytes(kept.body) == bytes(large.body)
        numbers = [mark.n for mark, _ in reader.heard]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        link.close()
        reader.close()


async def test_a_guarded_tap_lets_in_who_watches_the_fleet_and_no_client(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path)
    keys.make_unlisted("router")
    keys.add("ann", "client")
    keys.add("tom", "trainer")
    keys.add("watcher", "subscriber")
    keys.add("root", "admin")
    async with tapped_router(keys.server_settings("router")) as router:
        assert "#" in router.tap
        keys.add("late", "client")  # a list that changes has no sign of its own
        for name in ("watcher", "root"):
            reader = Reader(router, keys.client_settings(name))
            await reader.tick()
            reader.close()
        for name in ("ann", "tom"):
            refused = asyncio.Event()
            dialer = dialer_of(keys.client_settings(name))
            assert dialer is not None
            socket = new_socket(zmq.SUB)
            monitor = Monitor(socket, zmq.EVENT_HANDSHAKE_FAILED_AUTH, lambda _, r=refused: r.set())
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(dialer.dress(socket, router.tap))
            async with asyncio.timeout(DEADLINE_S):
                await refused.wait()
            assert not socket.poll(0)
            monitor.close()
            socket.close()


async def test_a_router_without_a_tap_publishes_nothing_and_says_so() -> None:
    async with RouterActor(RouterSettings(ANY, ANY), "r") as router:
        assert router.tap == router.core.context.tap == ""
