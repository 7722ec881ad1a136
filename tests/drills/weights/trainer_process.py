"""The drill's end of a trainer: it gives the orders and hears how far they are."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from rolloutbus.bus.actor.process import read_ready
from rolloutbus.launcher.plan import environment, python
from tests.drills.weights.orders import Forget, Order, Told, TrainerSettings


class TrainerDied(Exception):
    """Nobody had killed it."""


class TrainerProcess:
    """One life of a trainer; an async context manager that kills it at the end."""

    def __init__(self, settings: TrainerSettings, log: Path) -> None:
        self._settings = settings
        self._log_path = log
        self._log: BinaryIO | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.last = Told("waiting")
        """What it said last."""

    async def __aenter__(self) -> Self:
        self._log = self._log_path.open("ab", buffering=0)
        text = msgspec.json.encode(self._settings).decode()
        self._process = await asyncio.create_subprocess_exec(
            *python("tests.drills.weights.trainer"),
            "--settings-json",
            text,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            env=environment(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
        if self._process is not None:
            await self.kill()

    @property
    def pid(self) -> int:
        """Process id; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    async def ready(self, timeout_s: float) -> None:
        """Wait until it is connected."""
        async with asyncio.timeout(timeout_s):
            while read_ready(await self._line()) is None:
                pass

    def publish(self, order: Order) -> None:
        """Have it publish; see `reached` and `outcome`."""
        self.last = Told("waiting")
        self._order(order)

    def forget(self) -> None:
        """Have it give back what it keeps between publications; nothing says when it has."""
        self._order("forget")

    async def reached(self, is_so: Callable[[Told], bool], timeout_s: float) -> bool:
        """Wait until `is_so` of what it says. False: it has ended without."""
        async with asyncio.timeout(timeout_s):
            while not is_so(self.last) and self.last.outcome is None:
                self.last = msgspec.json.decode(await self._line(), type=Told)
        return is_so(self.last)

    async def outcome(self, timeout_s: float) -> Told:
        """Wait for the last word."""
        await self.reached(lambda told: told.outcome is not None, timeout_s)
        return self.last

    async def kill(self) -> None:
        """SIGKILL, unless it is dead."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _order(self, order: Order | Forget) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        if line := await self._process.stdout.readline():
            return line
        raise TrainerDied(f"its log is {self._log_path}")
