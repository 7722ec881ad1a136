"""SIGTERM to a worker of a fleet that was built by hand: its requests end, none is lost."""

import asyncio
import json
import re
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import rolloutbus
from rolloutbus import Rollout, RolloutClient
from rolloutbus.examples import relieve
from rolloutbus.launcher.plan import environment
from tests.integration.control_steps import N_BEFORE, N_TOKENS, PROMPT, all_under_way
from tests.integration.gateway_process import gateway
from tests.integration.live_fleet import (
    DEADLINE_S,
    PACE_S,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
    serves_at,
    status_when,
)
from tests.integration.programs import running, status_of
from tests.integration.token_limit import TokenLimit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.asyncio]

N_STREAMS = 24
"""Placement is by chance: enough of them that each worker has some."""
STEP_S, SLOW_STEP_S = 0.002, 0.1
COMMAND = (sys.executable, "-m", "tests.integration.patient_cli")


class HandBuilt(NamedTuple):
    address: str
    client: RolloutClient
    workers: dict[str, Process]
    limits: dict[str, TokenLimit]

    async def under_way(self) -> list[Streamed]:
        return await all_under_way([self.client] * N_STREAMS, fake_sampling(N_TOKENS))

    async def until_drains(self, name: str) -> None:
        await status_when(
            self.client,
            lambda status: (name, "draining") in [(w.name, w.state) for w in status.workers],
        )

    async def ended(self, name: str) -> int:
        return await status_of(self.workers[name])


@asynccontextmanager
async def fleet(
    folder: Path, *names: str, drain_s: float = DEADLINE_S, slow: str = ""
) -> AsyncGenerator[HandBuilt]:
    """A router and workers, each started by its own command; `slow` is one of them."""
    frontend, backend = (f"ipc://{folder}/{side}" for side in ("clients", "members"))
    limits = {name: TokenLimit(folder / f"limit-{name}") for name in names}
    commands = [["router", "--frontend", frontend, "--backend", backend]]
    for name, limit in limits.items():
        step_s = SLOW_STEP_S if name == slow else STEP_S
        options = ("slots=64", f"step_s={step_s}", f"hold_file={limit.path}")
        commands.append(
            [
                *("worker", "--name", name, "--router", backend, "--engine", "fake"),
                *("--stream", f"ipc://{folder}/{name}", "--drain", str(drain_s)),
                *(word for option in options for word in ("-e", option)),
            ]
        )
    async with AsyncExitStack() as stack:
        # Together, for most of a start is the import of our code.
        started = [
            await stack.enter_async_context(running(*COMMAND, *words, environment=environment()))
            for words in commands
        ]
        for each in started:
            await serves_at(each)
        client = await stack.enter_async_context(rolloutbus.connect(frontend, name="c"))
        yield HandBuilt(frontend, client, dict(zip(limits, started[1:], strict=True)), limits)


async def test_sigterm_lets_requests_end_and_gives_new_ones_to_others(tmp_path: Path) -> None:
    async with fleet(tmp_path, "w0", "w1") as built:
        with built.limits["w0"].at(N_BEFORE), built.limits["w1"].at(N_BEFORE):
            streams = await built.under_way()
            built.workers["w0"].terminate()
            await built.until_drains("w0")
            built.limits["w1"].move(N_TOKENS)
            new = await built.client.generate(
                PROMPT, fake_sampling(N_TOKENS), deadline_s=DEADLINE_S
            )
            assert new.worker == "w1"
        rollouts = [await streamed.rollout() for streamed in streams]
        assert await built.ended("w0") == 0
    for rollout in rollouts:
        assert_fake_rollout(PROMPT, rollout, N_TOKENS)
    # Each one ended where it began: nothing was sampled twice.
    assert {rollout.n_attempts for rollout in rollouts} == {1}
    assert {rollout.worker for rollout in rollouts} == {"w0", "w1"}


async def test_what_cannot_end_in_time_goes_on_elsewhere_with_its_tokens(tmp_path: Path) -> None:
    async with fleet(tmp_path, "w0", "w1", drain_s=0.2) as built:
        with built.limits["w0"].at(N_BEFORE):
            with built.limits["w1"].at(N_BEFORE):
                streams = await built.under_way()
            w0 = built.workers["w0"]
            w0.terminate()
            assert await built.ended("w0") == 0
            rollouts = [await streamed.rollout() for streamed in streams]
        assert w0.stderr is not None
        said = (await w0.stderr.read()).decode()
    for rollout in rollouts:
        assert_fake_rollout(PROMPT, rollout, N_TOKENS)
    moved = [rollout for rollout in rollouts if rollout.n_attempts == 2]
    assert moved
    assert {rollout.worker for rollout in rollouts} == {"w1"}
    assert re.search(rf"{len(moved)} requests run and get", said)
    assert re.search(rf"{len(moved)} requests had not ended", said)


async def test_a_worker_that_is_much_slower_than_the_others_is_relieved(
    tmp_path: Path, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("it looks at a fleet for some seconds: --exhaustive runs it")
    told: list[str] = []
    rule = relieve.Rule(factor=3.0, patience=2, look_s=1.5)
    sampling = fake_sampling(N_TOKENS)

    async def ask_until(leaving: asyncio.Event) -> list[Rollout]:
        rollouts: list[Rollout] = []
        while not leaving.is_set():
            rollouts.append(await built.client.generate(PROMPT, sampling, deadline_s=DEADLINE_S))
        return rollouts

    async with (
        fleet(tmp_path, "w0", "w1", "w2", slow="w2") as built,
        asyncio.timeout(DEADLINE_S),
        asyncio.TaskGroup() as tasks,
    ):
        left = asyncio.Event()
        asking = [tasks.create_task(ask_until(left)) for _ in range(N_STREAMS)]
        following = tasks.create_task(relieve.follow(built.client, rule, told.append))
        assert await built.ended("w2") == 0
        following.cancel()
        left.set()
    rollouts = [rollout for each in asking for rollout in each.result()]
    for rollout in rollouts:
        assert_fake_rollout(PROMPT, rollout, N_TOKENS)
    moved = [rollout for rollout in rollouts if rollout.n_attempts > 1]
    assert moved
    assert "w2" not in {rollout.worker for rollout in moved}
    assert told[0].startswith("w2 takes ")


async def test_sigterm_lets_the_answers_of_a_gateway_end(tmp_path: Path) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": N_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    async with (
        fleet(tmp_path, "w0") as built,
        gateway("--address", built.address, "--drain", str(DEADLINE_S)) as served,
    ):
        with built.limits["w0"].at(N_BEFORE):
            reader, writer = await served.open("POST", "/generate", json.dumps(body).encode())
            await reader.readuntil(b"data: ")
            served.process.terminate()
            await until_it_listens_no_more(served.url)
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
            assert await served.process.wait() == 143
        writer.close()
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": N_TOKENS}


async def until_it_listens_no_more(url: str) -> None:
    """Connections that wait to be accepted would hide that it has heard the signal."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(PACE_S)  # it tells nobody
