"""The launcher's socket for orders: what it is told that it cannot use, and who only talks."""

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from rolloutbus.bus.wire.errors import BusError, PeerLost
from rolloutbus.launcher.control_socket import ControlSocket, Order, Scale, Step, Tell, ask
from tests.integration.live_fleet import DEADLINE_S

pytestmark = pytest.mark.integration

MIB = 1 << 20


async def full(_: Order, __: Tell) -> list[str]:
    raise OSError(28, "No space left on device")


async def test_an_error_of_the_system_is_told_to_who_gave_the_order(tmp_path: Path) -> None:
    path = tmp_path / "control"
    async with ControlSocket(path, full):
        with pytest.raises(BusError, match="No space left on device"):
            async for _ in ask(path, Scale(3, 1.0)):
                pass


async def test_what_is_said_after_an_order_is_not_kept(tmp_path: Path) -> None:
    path, go_on = tmp_path / "control", asyncio.Event()

    async def wait(_: Order, __: Tell) -> list[str]:
        await go_on.wait()
        return ["w0"]

    async with ControlSocket(path, wait), asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"type":"restart","worker":"w0","drain_s":1}\n')
        tracemalloc.start()
        for _ in range(64):
            writer.write(bytes(MIB))
            await writer.drain()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        go_on.set()
        assert b"done" in await reader.readline()
        assert peak < 16 * MIB
        writer.close()


async def test_a_launcher_that_goes_in_the_middle_of_an_answer_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "control"

    async def go(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"type":"step","who":"w0","what":"drains"}\n{"type":"do')
        writer.close()

    async with await asyncio.start_unix_server(go, path), asyncio.timeout(DEADLINE_S):
        replies = ask(path, Scale(3, 1.0))
        assert await anext(replies) == Step("w0", "drains")
        with pytest.raises(PeerLost, match="the launcher has gone"):
            await anext(replies)
