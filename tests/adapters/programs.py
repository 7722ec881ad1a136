"""Programs with a framework's code, each in the environment of its framework."""

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
"""Of every line; imports alone take a minute on a busy machine."""

Line = dict[str, Any]


@asynccontextmanager
async def program(framework: str, *command: object, **more: str) -> AsyncGenerator[Process]:
    """One that runs in `.venv-FRAMEWORK`; it is ended at the end.

    Args:
        framework: as its environment is called. Variables that begin so, too, are not passed on.
        *command: arguments of its interpreter.
        **more: variables of its environment.
    """
    own = f"{framework.upper()}_"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    process = await asyncio.create_subprocess_exec(
        *(ROOT / f".venv-{framework}" / "bin" / "python", *map(str, command)),
        cwd=ROOT,
        stdout=PIPE,
        limit=2**24,
        env={**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()  # a trainer ends its own processes
            await process.wait()


async def lines_of(process: Process) -> AsyncGenerator[Line]:
    """Each line of JSON that a program prints until its end, which must be a good one."""
    assert process.stdout is not None
    while True:
        async with asyncio.timeout(DEADLINE_S):
            text = await process.stdout.readline()
        if not text:
            break
        if text.startswith(b'{"'):  # others are the framework's log
            yield json.loads(text)
    assert await process.wait() == 0
