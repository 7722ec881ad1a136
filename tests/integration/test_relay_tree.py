"""Two hosts on one machine: a version crosses the trainer's link once for four workers."""

import asyncio
import json
import sys

import pytest

from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import START_S
from tests.integration.store_harness import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * START_S)]

N_MIB = 32


async def test_a_version_crosses_the_link_once_for_four_workers() -> None:
    command = ["-m", "benchmarks.relay_tree", "--json", "--rounds", "1", "--mib", str(N_MIB)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env=environment(), stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 2 * START_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report = json.loads(output)
    if "skipped" in report:
        pytest.skip(report["skipped"])
    assert report["workers"] == 4
    assert 1.0 <= report["link_ratio"] <= report["goal"]
    assert report["link_ratio_without_relay"] >= 4.0
