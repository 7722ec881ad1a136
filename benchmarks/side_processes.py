"""Child processes of a benchmark, and what they use."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rolloutbus.launcher.plan import environment

START_S = 60.0
ANY_PORT = "tcp://127.0.0.1:0"


@asynccontextmanager
async def process(
    *arguments: str, stderr: int | None = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """`python ARGUMENTS`, killed at the end; its errors are our own if `stderr` is None."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=_environment(),
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@asynccontextmanager
async def router_process() -> AsyncGenerator[tuple[int, str, str]]:
    """A router of its own: (process id, frontend, backend)."""
    settings = {"frontend": ANY_PORT, "backend": ANY_PORT, "exit_with_parent": True}
    async with process("-m", "router", "--settings-json", json.dumps(settings)) as child:
        ready = (await said(child))["ready"]
        yield child.pid, ready["frontend"], ready["backend"]


async def said(child: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next JSON line that it prints."""
    assert child.stdout is not None
    async with asyncio.timeout(START_S):
        line = await child.stdout.readline()
    found: dict[str, Any] = json.loads(line)
    return found


def usage_of(pid: int) -> dict[str, float]:
    """File descriptors, resident MiB, CPU seconds so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    [kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return {
        "fds": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "rss_mib": round(kib / 1024, 1),
        "cpu_s": round(ticks / os.sysconf("SC_CLK_TCK"), 2),
    }


def machine() -> dict[str, float | int | None]:
    """What the numbers depend on."""
    return {"cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)}


def _environment() -> dict[str, str]:
    """Our environment, with the path of the benchmarks."""
    root = str(Path(__file__).resolve().parent.parent)
    found = environment()
    paths = [root, *filter(None, [found.get("PYTHONPATH")])]
    return {**found, "PYTHONPATH": os.pathsep.join(paths)}
