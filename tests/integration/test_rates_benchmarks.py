"""Two benchmarks measure what they say, at their smallest; their numbers are not judged."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import START_S
from tests.integration.store_harness import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * START_S)]


@pytest.fixture(autouse=True)
def _nightly(is_exhaustive: bool) -> None:
    if not is_exhaustive:
        pytest.skip("each starts a fleet for what CI does not need to know: --exhaustive")


async def _report(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", *arguments, "--rounds", "1", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment(), stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(START_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return json.loads(output)


@pytest.mark.parametrize("endpoint", ["generate", "v1/completions"])
async def test_the_gateway_alone_is_measured_by_its_processes(endpoint: str) -> None:
    short = ["--in-flight", "2", "--seconds", "0.05", "--first-seconds", "0.1"]
    report = await _report("benchmarks.gateway_rates", "--peers", "--endpoint", endpoint, *short)
    assert [row["mode"] for row in report["rates"]] == ["plain", "stream"]
    for row in report["rates"]:
        assert row["requests_per_s"] > 0
        assert set(row["cpu_us"]) == {"gateway", "router", "engines"}
        assert "of_smg" not in row
    [first] = report["first_token"]
    assert 0 < first["p50_ms"] <= first["p99_ms"]


async def test_the_engine_is_measured_beside_generate() -> None:
    report = await _report("benchmarks.engine_against_generate", "--rows", "2")
    [row] = report["rows"]
    assert row["rows"] == 2
    assert min(row["us_per_token"].values()) > 0
    assert min(row["engine_ratio"], row["all_ratio"], row["wall_ratio"]) > 0
