"""Updates that a worker was not there for, and one that its trainer takes back."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch

from rolloutbus import Fleet, Rollout, RolloutClient, WeightPublisher
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from tests.integration.live_fleet import (
    DEADLINE_S,
    PATIENT,
    START_S,
    STEADY_HOST,
    assert_fake_rollout,
    fake_sampling,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [4, 5, 6]
N_TOKENS = 3
N_UPDATES = 7
WEIGHTS = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
ENGINE = {"slots": 4, "step_s": 0.005}
FLEET: UpOptions = {
    "workers": 1,
    "engine": "fake",
    "engine_options": ENGINE,
    "lease": PATIENT,
    "host": STEADY_HOST,  # one that a test stops before it has to prepare is to take part, too
}


@asynccontextmanager
async def joining(fleet: Fleet, name: str, folder: Path) -> AsyncGenerator[None]:
    """A worker process that nobody planned for."""
    settings = WorkerSettings(
        name=name,
        router=fleet.backend,
        stream=f"ipc://{folder}/{name}",
        engine="fake",
        engine_options=ENGINE,
        lease=PATIENT,
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutbus.engine_worker"),
        f"--settings-json={msgspec.json.encode(settings).decode()}",
        stdout=asyncio.subprocess.DEVNULL,
        env=environment(),
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), DEADLINE_S)


@pytest_asyncio.fixture(loop_scope="module")
async def newest(client: RolloutClient) -> int:
    """The last of several updates."""
    version = 0
    for _ in range(N_UPDATES):
        published = await WeightPublisher(client).publish(WEIGHTS, deadline_s=DEADLINE_S)
        version = published.version
    return version


async def test_late_joiner_serves_only_the_newest_version(
    fleet: Fleet, client: RolloutClient, newest: int, tmp_path: Path
) -> None:
    seen: list[Rollout] = []

    async def ask_until_it_serves() -> None:
        while all(rollout.worker != "late" for rollout in seen):
            rollout = await client.generate(
                PROMPT, fake_sampling(N_TOKENS), versions="any", deadline_s=DEADLINE_S
            )
            assert_fake_rollout(PROMPT, rollout, N_TOKENS)
            seen.append(rollout)

    async with joining(fleet, "late", tmp_path):
        # More askers than the first worker has places: whoever serves is given something.
        async with asyncio.timeout(START_S), asyncio.TaskGroup() as askers:
            for _ in range(8):
                askers.create_task(ask_until_it_serves())
        status = await client.status()
    assert {tuple(rollout.version_runs) for rollout in seen} == {((newest, N_TOKENS),)}
    assert {(each.version, each.problem) for each in status.workers} == {(newest, "")}
    assert status.counters["catch_ups"] >= 1


async def test_publication_that_its_trainer_cancels_changes_nothing(
    fleet: Fleet, client: RolloutClient, newest: int
) -> None:
    publisher = WeightPublisher(client)
    [host] = fleet.host_pids(fleet.worker_names[0])
    os.kill(host, signal.SIGSTOP)  # it cannot prepare, so the update waits for it
    try:
        handle = publisher.start(WEIGHTS, deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            async for progress in handle.changes():
                if progress.phase == "preparing":
                    break
        [update] = (await client.status()).updates
        assert (update.version, update.phase) == (handle.progress.version, "preparing")
        assert await handle.cancel()
        status = await client.status()
        assert (status.committed["default"], status.updates) == (newest, [])
    finally:
        os.kill(host, signal.SIGCONT)
    published = await publisher.publish(WEIGHTS, require="all", deadline_s=DEADLINE_S)
    assert published.version > update.version
