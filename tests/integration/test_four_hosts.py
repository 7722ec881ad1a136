"""The demo on four hosts with bad links: weights, streams, a dead router, a host cut off."""

import asyncio
import json
import re
import sys
import time
from asyncio.subprocess import Process
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rolloutbus.examples.tiny_model import build_tiny_model
from tests.integration.hosts import DEADLINE_S, START_S, Host, Quality, ended, hosts
from tests.integration.key_directory import KeyDirectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LINKS = Quality(delay_ms=20.0, jitter_ms=5.0, loss=0.005, rate_mbit=100.0)
PROGRAM = (sys.executable, "-m", "tests.integration.far_demo")
CUT_S = 10.0
"""More than three leases."""
TAKEOVER_S = 10.0
"""At most so long may the active router be silent before its standby serves."""
TAKES_OVER = re.compile(r"has not answered for (\d+\.\d) s, and \S+ asks .* this one takes over")
N_STEPS_BEFORE = 6
MIN_DELTAS = 8
"""Of 96 tokens; without a stream there would be one, with the result."""
MAX_LINK_SHARE = 1.3
"""Bytes that the trainer's host sends for a version, by those of the model: what rollouts need, and
what TCP sends again, included."""


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


class Move(NamedTuple):
    """From one router to the other."""

    silence_s: float
    """How long the one that takes over had not heard the active one, as it says."""
    status_s: float
    """From the fault until the other one answered the trainer."""
    rollout_s: float
    """From the fault until a rollout of the trainer ended there."""


class Routers:
    """The active router on one host, and its standby on another."""

    def __init__(self, keys: KeyDirectory, active: Host, standby: Host) -> None:
        """`keys`: a directory that both hosts have, as on a shared file system."""
        self._hosts = (active, standby)
        self._own = ("--key", str(keys.file("router")), "-l", str(keys.allow_list))
        self.frontends, self.backends = (
            [f"tcp://{each.address}:{port}" for each in self._hosts] for port in (7777, 7778)
        )
        self._processes: list[Process] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for n, watch in ((1, "--standby-of"), (0, "--standby")):
            ends = ("--frontend", self.frontends[n], "--backend", self.backends[n])
            command = ("router", *ends, watch, self.frontends[1 - n], *self._own)
            process = await stack.enter_async_context(self._hosts[n].serving('"ready"', *command))
            self._processes.insert(0, process)

    def kill(self, n: int) -> None:
        """Kill one; nobody starts it again."""
        self._processes[n].kill()

    async def moved(self, n: int, since: float, trainer: Trainer) -> Move:
        """Wait until this one has taken over from the other one, which has been gone `since`."""
        told = await trainer.ask("moved", "status_at")
        output = self._processes[n].stdout
        assert output is not None
        async with asyncio.timeout(DEADLINE_S):
            while not (found := TAKES_OVER.search((line := await output.readline()).decode())):
                assert line, "it has ended"
        status_s, rollout_s = (round(told[each] - since, 1) for each in ("status_at", "rollout_at"))
        return Move(float(found[1]), status_s, rollout_s)


async def bring_up(
    stack: AsyncExitStack, all_hosts: list[Host], model: Path
) -> tuple[Trainer, Routers]:
    """Store, trainer, standby and a worker on the first host, the router on the second.

    Each other one has a worker, too.
    """
    first, *others = all_hosts
    keys = KeyDirectory(first.home)
    keys.make_unlisted("router")
    keys.add("store", "store")
    keys.add("trainer", "trainer")
    keys.add("w0", "worker")
    routers = Routers(keys, others[0], first)
    await routers.start(stack)
    frontend, backend = ",".join(routers.frontends), ",".join(routers.backends)
    program = await first.start(*PROGRAM, frontend, "trainer.key", str(model))
    stack.push_async_callback(ended, program)
    engine = ("--model", str(model), "-e", "threads=1", "-e", "slots=6")

    async def add_worker(host: Host, name: str) -> None:
        if host is not first:
            rights = (name, "--role", "worker", "--router", backend, "-l", "allow.json")
            await host.bus("keys", "join", await first.bus("keys", "invite", *rights))
        worker = ("worker", "--name", name, "--key", f"{name}.key", "--router", backend)
        await stack.enter_async_context(host.serving('"ready"', *worker, *engine))

    store = ("store", "--key", "store.key", "--router", backend, "--directory", "versions")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stack.enter_async_context(first.serving('"ready"', *store)))
        for host, name in zip(all_hosts, ("w0", "far-0", "far-1", "far-2"), strict=True):
            tasks.create_task(add_worker(host, name))
    return Trainer(program), routers


class Run(NamedTuple):
    """What was seen of it."""

    start: dict[str, Any]
    steps: list[dict[str, Any]]
    n_hit: int
    """Rollouts that were on the host when it was cut off."""
    moves: list[Move]
    outcome: dict[str, Any]


async def run_demo(all_hosts: list[Host], model: Path) -> Run:
    """Train for a while, cut off the active router and a worker, kill the next, and train on."""
    async with AsyncExitStack() as stack:
        trainer, routers = await bring_up(stack, all_hosts, model)
        start = await trainer.ask("begin", "streams")
        await trainer.step_with(N_STEPS_BEFORE, "far-0")
        hit = await trainer.ask("busy far-0", "mid_generation")
        all_hosts[1].cut()
        cut_at = time.monotonic()
        moves = [await routers.moved(1, cut_at, trainer)]
        with suppress(TimeoutError):
            async with asyncio.timeout(cut_at + CUT_S - time.monotonic()):
                while True:
                    await trainer.report()
        all_hosts[1].mend()
        await trainer.step_with(2, "far-0")
        routers.kill(1)
        moves.append(await routers.moved(0, time.monotonic(), trainer))
        await trainer.step_with(1, "far-0")
        outcome = await trainer.ask("", "requested")
    return Run(start, trainer.steps, hit["mid_generation"], moves, outcome)


async def test_the_demo_outlives_bad_links_a_dead_router_and_the_loss_of_a_host(
    tmp_path: Path, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("takes two minutes: `make nightly`, or --exhaustive")
    build_tiny_model(tmp_path / "model", seed=0)
    with hosts(4, tmp_path, LINKS) as all_hosts:
        run = await run_demo(all_hosts, tmp_path / "model")
    start, outcome = run.start, run.outcome
    sent = [start["sent_bytes"], *(each["sent_bytes"] for each in run.steps)]
    shares = [round((b - a) / start["model_bytes"], 2) for a, b in pairwise(sent)]
    print(f"links: {LINKS}")
    print(f"streams: {start['streams']}")
    print(f"bytes sent for each version, by those of the model: {shares}")
    print(f"seconds of each publication: {[each['publish_s'] for each in run.steps]}")
    print(f"the router moved when it was cut off, and when it was killed: {run.moves}")
    print(f"rollouts: {outcome}; {run.n_hit} were on the host that was cut off")
    assert set(start["streams"]) == {"w0", "far-0", "far-1", "far-2"}
    assert all(each["deltas"] >= MIN_DELTAS for each in start["streams"].values())
    whole = shares[:N_STEPS_BEFORE]
    assert sum(whole) / len(whole) <= MAX_LINK_SHARE
    assert all(each.silence_s <= TAKEOVER_S for each in run.moves)
    assert outcome["requested"] == outcome["finished"] > 0
    assert (outcome["lost"], outcome["duplicated"], outcome["problems"]) == (0, 0, [])
    assert outcome["witnessed"] > outcome["requested"] / 2
