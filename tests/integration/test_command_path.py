"""The benchmark of whole command paths measures two of them, and leaves no process behind."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import START_S
from tests.integration.store_harness import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * START_S)]

SMALL = ["--workers", "1", "--in-flight", "4", "--rounds", "1", "--seconds", "0.05"]


@asynccontextmanager
async def _command_path(*arguments: str) -> AsyncGenerator[Process]:
    command = [sys.executable, "-m", "benchmarks.command_path", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment(), stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _of_paths() -> set[int]:
    """Processes that run a path, of whatever benchmark."""
    found: set[int] = set()
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"benchmarks.command_peers" in line.read_bytes():
                found.add(int(line.parent.name))
    return found


async def test_two_paths_are_measured_in_turn_and_their_processes_end() -> None:
    before = _of_paths()
    async with _command_path("--peers", "zmq", *SMALL, "--json") as process:
        async with asyncio.timeout(START_S):
            output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    report = json.loads(output)
    assert [row["path"] for row in report["rows"]] == ["rolloutbus", "zmq"]
    for row in report["rows"]:
        assert row["requests_per_s"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["cpu_us_per_request"] >= 0
    assert report["rows"][0]["rolloutbus_ratio"] == 1
    assert report["goals"] == []
    assert report["not_measured"] == {}
    assert _of_paths() <= before
