"""Programs that a test starts as a user does; they end with it, and all that they started."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from tests.integration.live_fleet import START_S


@asynccontextmanager
async def running(*command: str, environment: Mapping[str, str]) -> AsyncGenerator[Process]:
    """A program and what it starts; all of it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def status_of(process: Process) -> int:
    """Wait for its end; returns its exit status."""
    async with asyncio.timeout(START_S):
        return await process.wait()
