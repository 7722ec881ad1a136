"""What each way of breaking a link looks like from both sides of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.drills.chaos.proxy import Direction, ProxyLink

DEADLINE_S = 60.0
NOTHING_S = 0.15
"""Loopback needs a hundredth of it."""
NEVER_S = 3600.0


@dataclass
class Ends:
    link: ProxyLink
    near: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    far: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    async def up(self, data: bytes) -> None:
        self.near[1].write(data)
        await self.near[1].drain()

    async def down(self, data: bytes) -> None:
        self.far[1].write(data)
        await self.far[1].drain()


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    """A link with one connection through it."""
    arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.put_nowait((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with ProxyLink(f"tcp://127.0.0.1:{port}") as link:
        near = await asyncio.open_connection("127.0.0.1", _port(link))
        async with asyncio.timeout(DEADLINE_S):
            far = await arrived.get()
        yield Ends(link, near, far)
        for writer in (near[1], far[1]):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    server.close()


def _port(link: ProxyLink) -> int:
    return int(link.endpoint.rpartition(":")[2])


async def _read(reader: asyncio.StreamReader, n_bytes: int) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        return await reader.readexactly(n_bytes)


async def _is_mute(reader: asyncio.StreamReader) -> bool:
    """No byte, no FIN and no RST comes."""
    try:
        async with asyncio.timeout(NOTHING_S):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def test_bytes_pass_both_ways(ends: Ends) -> None:
    await ends.up(b"ping")
    assert await _read(ends.far[0], 4) == b"ping"
    await ends.down(b"pong")
    assert await _read(ends.near[0], 4) == b"pong"


async def test_cut_holds_bytes_until_it_heals(ends: Ends) -> None:
    ends.link.cut()
    await ends.up(b"late")
    await ends.down(b"too")
    assert await _is_mute(ends.far[0])
    assert await _is_mute(ends.near[0])
    ends.link.heal()
    assert await _read(ends.far[0], 4) == b"late"
    assert await _read(ends.near[0], 3) == b"too"


@pytest.mark.parametrize("cut", ["up", "down"])
async def test_one_way_cut_leaves_the_other_way_open(ends: Ends, cut: Direction) -> None:
    ends.link.cut(cut)
    await ends.up(b"up")
    await ends.down(b"dn")
    dead, alive = (ends.far, ends.near) if cut == "up" else (ends.near, ends.far)
    assert len(await _read(alive[0], 2)) == 2
    assert await _is_mute(dead[0])


async def test_cut_hides_the_end_of_a_connection(ends: Ends) -> None:
    ends.link.cut()
    ends.near[1].close()
    assert await _is_mute(ends.far[0])
    ends.link.heal()
    async with asyncio.timeout(DEADLINE_S):
        assert await ends.far[0].read() == b""


async def test_half_open_link_is_dead_on_the_far_side_only(ends: Ends) -> None:
    ends.link.halve()
    with pytest.raises(ConnectionError):
        await _read(ends.far[0], 1)
    assert await _is_mute(ends.near[0])
    ends.link.heal()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await _read(ends.near[0], 1)


async def test_reset_is_seen_on_both_sides(ends: Ends) -> None:
    ends.link.reset()
    for reader in (ends.near[0], ends.far[0]):
        with pytest.raises(ConnectionError):
            await _read(reader, 1)


async def test_delay_holds_one_direction(ends: Ends) -> None:
    ends.link.delay_s["up"] = NEVER_S
    await ends.up(b"slow")
    await ends.down(b"fast")
    assert await _read(ends.near[0], 4) == b"fast"
    assert await _is_mute(ends.far[0])


async def test_what_was_delayed_arrives_after_its_delay(ends: Ends) -> None:
    ends.link.delay_s["up"] = NOTHING_S
    now = asyncio.get_running_loop().time
    began_at = now()
    await ends.up(b"slow")
    assert await _read(ends.far[0], 4) == b"slow"
    assert now() - began_at >= NOTHING_S


async def test_connection_made_during_a_cut_arrives_when_it_heals(ends: Ends) -> None:
    ends.link.cut()
    reader, writer = await asyncio.open_connection("127.0.0.1", _port(ends.link))
    assert ends.link.n_connections == 1
    assert await _is_mute(reader)
    writer.close()
