"""The benchmark of whole command paths measures two of them, and leaves no process behind."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import START_S, process_ends
from tests.integration.store_harness import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * START_S)]

OURS = "TEST_OF_COMMAND_PATHS"
"""Variable of all that this test starts."""
SMALL = ["--workers", "1", "--in-flight", "4", "--rounds", "1", "--seconds", "0.05"]


@asynccontextmanager
async def _command_path(*arguments: str) -> AsyncGenerator[Process]:
    command = [sys.executable, "-m", "benchmarks.command_path", *arguments]
    variables = {**environment(), OURS: str(os.getpid())}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=variables, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _ours() -> set[int]:
    """What the benchmark has started, however far down."""
    mark = f"{OURS}={os.getpid()}".encode()
    found: set[int] = set()
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in variables.read_bytes().split(b"\0"):
                found.add(int(variables.parent.name))
    return found


async def test_two_paths_are_measured_in_turn_and_their_processes_end() -> None:
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
    for pid in _ours():
        await process_ends(pid)
