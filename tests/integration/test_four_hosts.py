"""Four hosts under load: workers pass weights on, and a host that is cut off comes back."""

import asyncio
import json
import sys
from asyncio.subprocess import Process
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts import CLI, DEADLINE_S, Host, ended, hosts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

N_ROLLOUTS, N_TOKENS = 40, 600
"""As in `far_load`."""
ENGINE = ("--engine", "fake", "-e", "step_s=0.05")
LIST = ("-l", "keys/allow.json")
PROGRAM = (sys.executable, "-m", "tests.integration.far_load")
CUT_S = 10.0
"""More than three leases."""


async def join(first: Host, host: Host, name: str, role: str) -> None:
    token = await first.bus("keys", "invite", name, "--role", role, *LIST)
    await host.bus("keys", "join", token, "--dir", "keys")


async def next_line(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    seen: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while True:
            line = (await process.stdout.readline()).decode()
            assert line, "".join(seen)
            seen.append(line)
            if line.startswith("{"):
                return json.loads(line)


async def is_back(host: Host, worker: str) -> None:
    """Wait until the router counts a worker as ready again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            _, shown = await host.run(*CLI, "status", "--key", "keys/trainer.key", "--json")
            rows = json.loads(shown)["workers"]
            if {"ready"} == {each["state"] for each in rows if each["name"] == worker}:
                return


async def test_four_hosts_pass_weights_on_and_outlive_the_loss_of_one(
    tmp_path: Path, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("takes a minute: `make nightly`, or --exhaustive")
    with hosts(4, tmp_path) as all_hosts:
        first, *others = all_hosts
        async with AsyncExitStack() as stack:
            up = ("up", "--secure", "keys", "--address", f"tcp://{first.address}:7777", "-n", "1")
            await stack.enter_async_context(first.serving("Ctrl-C", *up, *ENGINE))
            for index, host in enumerate(others):
                name = f"far-{index}"
                await join(first, host, name, "worker")
                worker = ("worker", "--name", name, "--key", f"keys/{name}.key", *ENGINE)
                await stack.enter_async_context(host.serving('"ready"', *worker))
            trainer = others[-1]
            await join(first, trainer, "trainer", "trainer")
            program = await trainer.start(*PROGRAM, "keys/trainer.key")
            stack.push_async_callback(ended, program)
            published = await next_line(program)
            far = dict.fromkeys(("far-0", "far-1", "far-2"), "tcp")
            assert published["transport"] == {**far, "w0": "shm"}
            # Two pull from the store, and one from another worker: that must have let it in.
            assert "does not answer" not in str(published["why"])
            await next_line(program)
            others[0].cut()
            await asyncio.sleep(CUT_S)  # nothing happens meanwhile that could be waited for
            others[0].mend()
            finished = await next_line(program)
            assert finished["finished"] == [N_TOKENS] * N_ROLLOUTS
            await is_back(trainer, "far-0")
