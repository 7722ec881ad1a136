"""`rolloutbus top` shows a live fleet and leaves the terminal as it found it."""

import asyncio
import errno
import json
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import Fleet
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from tests.integration.live_fleet import DEADLINE_S, START_S, fake_sampling

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine": "fake", "store": False}
TOP = [sys.executable, "-m", "rolloutbus.cli.main", "top", "--interval", "0.2"]
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
LAST = b"<nothing comes after this>"


class Terminal:
    """A pseudo-terminal with `top` in it."""

    def __init__(self, master: int, slave: int) -> None:
        self._master = master
        self._slave = slave
        self.before = termios.tcgetattr(slave)
        self.shown = b""
        self._changes = asyncio.Event()
        os.set_blocking(master, False)
        asyncio.get_running_loop().add_reader(master, self._read)

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    async def shows(self, wanted: bytes) -> None:
        async with asyncio.timeout(START_S):
            while wanted not in self.shown:
                self._changes.clear()
                await self._changes.wait()

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def shows_all(self) -> None:
        """Wait for what `top` has written before it ended, which the system passes on later."""
        os.write(self._slave, LAST)
        await self.shows(LAST)

    def _read(self) -> None:
        try:
            while piece := os.read(self._master, 65536):
                self.shown += piece
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EIO):
                raise
        self._changes.set()


@asynccontextmanager
async def top_in_terminal(
    address: str,
) -> AsyncGenerator[tuple[Terminal, asyncio.subprocess.Process]]:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (30, 100))
    terminal = Terminal(master, slave)
    process = await asyncio.create_subprocess_exec(
        *TOP,
        "--address",
        address,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**environment(), "TERM": "xterm-256color"},
    )
    try:
        yield terminal, process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)
        os.close(slave)


async def printed_by(command: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=environment()
    )
    async with asyncio.timeout(START_S):
        told, _ = await process.communicate()
    assert process.returncode == 0
    return told.decode()


@pytest.mark.parametrize(("end", "status"), [("q", 0), ("ctrl-c", 130)], ids=["q", "ctrl-c"])
async def test_q_and_ctrl_c_leave_the_terminal_clean(fleet: Fleet, end: str, status: int) -> None:
    async with top_in_terminal(fleet.address) as (terminal, process):
        await terminal.shows(b"w1")
        assert ENTER_SCREEN in terminal.shown
        assert HIDE_CURSOR in terminal.shown
        assert terminal.settings != terminal.before  # keys come one by one, unseen
        if end == "q":
            terminal.press(b"q")
        else:
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(START_S):
            await process.wait()
        await terminal.shows_all()
        assert process.returncode == status
        assert terminal.settings == terminal.before
        assert terminal.shown.rfind(LEAVE_SCREEN) > terminal.shown.rfind(ENTER_SCREEN)
        assert terminal.shown.rfind(SHOW_CURSOR) > terminal.shown.rfind(HIDE_CURSOR)
        assert b"Traceback" not in terminal.shown


async def test_one_frame_as_json_has_the_rates_of_the_interval(fleet: Fleet) -> None:
    async with rolloutbus.connect(fleet.address, name="busy") as client:

        async def sample() -> None:
            while True:
                await client.generate([1, 2], fake_sampling(50), deadline_s=DEADLINE_S)

        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(sample())
            # Until a frame has seen two heartbeats with tokens in between.
            async with asyncio.timeout(START_S):
                while True:
                    told = await printed_by(
                        [*TOP, "--address", fleet.address, "--once", "--json", "--interval", "1.2"]
                    )
                    frame = json.loads(told)
                    if frame["tokens_per_s"] > 0:
                        break
            load.cancel()
    assert [row["name"] for row in frame["rows"]] == ["w0", "w1"]
    assert frame["n_slots"] == sum(row["slots"] for row in frame["rows"])


async def test_without_a_terminal_frames_come_one_after_the_other(fleet: Fleet) -> None:
    process = await asyncio.create_subprocess_exec(
        *TOP, "--address", fleet.address, stdout=asyncio.subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            for _ in range(2):
                assert b"w1" in await process.stdout.readuntil(b"w1")
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
    assert process.returncode == 130
    assert b"\x1b" not in rest


async def test_a_router_that_is_gone_is_shown_and_top_goes_on() -> None:
    async with (
        rolloutbus.up(**FLEET) as fleet,
        top_in_terminal(fleet.address) as (terminal, process),
    ):
        await terminal.shows(b"w1")
        os.kill(fleet.pids["router"], signal.SIGSTOP)
        try:
            await terminal.shows(b"no answer")
        finally:
            os.kill(fleet.pids["router"], signal.SIGCONT)
        assert process.returncode is None
        terminal.press(b"q")
        async with asyncio.timeout(START_S):
            await process.wait()


async def test_no_router_is_one_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *TOP,
        "--address",
        f"ipc://{tmp_path}/nobody",
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    async with asyncio.timeout(START_S):
        _, said = await process.communicate()
    assert process.returncode == 3
    assert said.startswith(b"error: no router answers at ")
