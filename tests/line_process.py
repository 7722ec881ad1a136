"""Processes that tests give orders to and hear from: a line of JSON each way."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 300.0
"""Of every wait; a first use of a GPU takes seconds, imports on a busy machine minutes."""
LINE_BYTES = 1 << 24
"""An answer is no longer."""


class LineProcess:
    """One of them; an order says in `do` what is wanted."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def tell(self, do: str, **order: object) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({'do': do, **order})}\n".encode())

    async def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            return json.loads(await self._process.stdout.readline())

    async def ask(self, do: str, **order: object) -> dict[str, Any]:
        """Both."""
        self.tell(do, **order)
        return await self.hear()

    async def ended(self) -> None:
        """Wait until it has."""
        await self._process.wait()

    async def kill(self) -> None:
        """At once, if it has not ended."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def line_processes(
    modules: Iterable[Sequence[str]], python: str | Path = sys.executable
) -> AsyncGenerator[list[LineProcess]]:
    """One for each module with its arguments, ready; killed at the end."""
    started: list[LineProcess] = []
    try:
        for module in modules:
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", *module),
                cwd=ROOT,
                stdin=PIPE,
                stdout=PIPE,
                limit=LINE_BYTES,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            started.append(LineProcess(process))
        for each in started:
            assert await each.hear() == {"ready": True}
        yield started
    finally:
        for each in started:
            await each.kill()
