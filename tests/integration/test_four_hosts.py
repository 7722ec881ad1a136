"""The demo on four hosts with bad links: what weights cost, how streams come, a host cut off."""

import asyncio
import json
import sys
from asyncio.subprocess import Process
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rolloutbus.examples.tiny_model import build_tiny_model
from tests.integration.hosts import START_S, Host, Quality, ended, hosts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LINKS = Quality(delay_ms=20.0, jitter_ms=5.0, loss=0.005, rate_mbit=100.0)
LIST = ("-l", "keys/allow.json")
PROGRAM = (sys.executable, "-m", "tests.integration.far_demo")
CUT_S = 10.0
"""More than three leases."""
N_STEPS_BEFORE = 6
MIN_DELTAS = 8
"""Of 96 tokens; without a stream there would be one, with the result."""
MAX_LINK_SHARE = 1.3
"""Bytes that the trainer's host sends for a version, by those of the model: what rollouts need, and
what TCP sends again, included."""


async def join(first: Host, host: Host, name: str, role: str) -> None:
    token = await first.bus("keys", "invite", name, "--role", role, *LIST)
    await host.bus("keys", "join", token, "--dir", "keys")


class Trainer:
    """The program on the first host."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.steps: list[dict[str, Any]] = []

    async def report(self) -> dict[str, Any]:
        """What it says next; a step is kept."""
        assert self._process.stdout is not None
        seen: list[str] = []
        while True:
            line = (await self._process.stdout.readline()).decode()
            assert line, "".join(seen)
            seen.append(line)
            if line.startswith("{"):
                said = json.loads(line)
                if "step" in said:
                    self.steps.append(said)
                return said

    async def step_with(self, n: int, worker: str) -> None:
        """Wait until this worker has taken so many further versions."""
        async with asyncio.timeout(START_S):
            for _ in range(n):
                while worker not in (await self.report())["workers"]:
                    pass

    async def ask(self, question: str, answer: str) -> dict[str, Any]:
        """What it says when it is given this line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n".encode())
        async with asyncio.timeout(START_S):
            while answer not in (said := await self.report()):
                pass
        return said


async def bring_up(stack: AsyncExitStack, all_hosts: list[Host], model: Path) -> Trainer:
    """Router, store, trainer and a worker on the first host, a worker on each other one."""
    first, *others = all_hosts
    engine = ("--model", str(model), "-e", "threads=1", "-e", "slots=6")
    up = ("up", "--secure", "keys", "--address", f"tcp://{first.address}:7777", "-n", "1")
    await stack.enter_async_context(first.serving("Ctrl-C", *up, *engine))

    async def add_worker(host: Host, name: str) -> None:
        await join(first, host, name, "worker")
        worker = ("worker", "--name", name, "--key", f"keys/{name}.key", *engine)
        await stack.enter_async_context(host.serving('"ready"', *worker))

    async with asyncio.TaskGroup() as tasks:
        for index, host in enumerate(others):
            tasks.create_task(add_worker(host, f"far-{index}"))
        tasks.create_task(join(first, first, "trainer", "trainer"))
    program = await first.start(*PROGRAM, "keys/trainer.key", str(model))
    stack.push_async_callback(ended, program)
    return Trainer(program)


async def test_the_demo_outlives_bad_links_and_the_loss_of_a_host(
    tmp_path: Path, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("takes two minutes: `make nightly`, or --exhaustive")
    build_tiny_model(tmp_path / "model", seed=0)
    with hosts(4, tmp_path, LINKS) as all_hosts:
        async with AsyncExitStack() as stack:
            trainer = await bring_up(stack, all_hosts, tmp_path / "model")
            async with asyncio.timeout(START_S):
                start = await trainer.report()
            await trainer.step_with(N_STEPS_BEFORE, "far-0")
            hit = await trainer.ask("far-0", "mid_generation")
            all_hosts[1].cut()
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    while True:
                        await trainer.report()
            all_hosts[1].mend()
            await trainer.step_with(2, "far-0")
            outcome = await trainer.ask("", "requested")
    sent = [start["sent_bytes"], *(each["sent_bytes"] for each in trainer.steps)]
    shares = [round((b - a) / start["model_bytes"], 2) for a, b in pairwise(sent)]
    print(f"links: {LINKS}")
    print(f"streams: {start['streams']}")
    print(f"bytes sent for each version, by those of the model: {shares}")
    print(f"seconds of each publication: {[each['publish_s'] for each in trainer.steps]}")
    print(f"rollouts: {outcome}; {hit['mid_generation']} were on the host that was cut off")
    assert set(start["streams"]) == {"w0", "far-0", "far-1", "far-2"}
    assert all(each["deltas"] >= MIN_DELTAS for each in start["streams"].values())
    whole = shares[:N_STEPS_BEFORE]
    assert sum(whole) / len(whole) <= MAX_LINK_SHARE
    assert outcome["requested"] == outcome["finished"] > 0
    assert (outcome["lost"], outcome["duplicated"], outcome["problems"]) == (0, 0, [])
    assert outcome["witnessed"] > outcome["requested"] / 2
