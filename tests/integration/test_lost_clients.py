"""Nobody's work goes on: when a client leaves or dies, workers stop sampling for it."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import rolloutbus
from rolloutbus import RolloutClient
from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.actor.supervisor import Supervisor
from rolloutbus.engine_worker.settings import HostSettings, WorkerSettings
from rolloutbus.launcher.plan import environment
from rolloutbus.router.settings import RouterSettings
from tests.integration.killed_client import N_STREAMS, N_TOKENS
from tests.integration.live_fleet import (
    DEADLINE_S,
    PATIENT,
    START_S,
    Streamed,
    facts_when,
    fake_sampling,
    live_and_die,
    status_when,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SOON_S, NEVER_S = 5.0, 3600.0
"""Graces. A client that a busy machine holds up is not to count as one that is gone."""
DOOMED = Path(__file__).with_name("killed_client.py")


@asynccontextmanager
async def small_fleet(path: Path, grace_s: float) -> AsyncGenerator[RolloutClient]:
    """One worker, a router that gives silent clients this grace, and a client that watches."""
    router = RouterSettings(
        frontend=f"ipc://{path}/f",
        backend=f"ipc://{path}/b",
        client_grace_s=grace_s,
        leases=PATIENT,
        exit_with_parent=True,
    )
    worker = WorkerSettings(
        name="w0",
        router=router.backend,
        stream=f"ipc://{path}/s",
        engine="fake",
        engine_options={"step_s": 0.005},
        lease=PATIENT,
        host=HostSettings(give_up_s=DEADLINE_S),
        exit_with_parent=True,
    )
    async with Supervisor() as supervisor:
        supervisor.start(process_of("rolloutbus.router", router, path))
        supervisor.start(process_of("rolloutbus.engine_worker", worker, path))
        await supervisor.wait_ready(START_S)
        async with rolloutbus.connect(router.frontend, name="watch") as client:
            yield client


def process_of(module: str, settings: RouterSettings | WorkerSettings, path: Path) -> ProcessSpec:
    described = msgspec.json.encode(settings).decode()
    command = [sys.executable, "-m", module, "--settings-json", described]
    return ProcessSpec(module, command, path / f"{module}.log", environment())


async def runs_nothing(client: RolloutClient) -> None:
    """Wait until neither the router's table nor any engine holds a request."""
    await status_when(client, lambda status: not status.n_running and not status.n_queued)
    await facts_when(
        client, lambda facts: len(facts) == 1 and not any(f.n_running for f in facts.values())
    )


async def live_and_leave(address: str) -> None:
    """A client begins `N_STREAMS` rollouts and says goodbye in the middle of them."""
    async with rolloutbus.connect(address, name="leaver") as leaver:
        streams = [
            Streamed(leaver, [1, 2, i], fake_sampling(N_TOKENS), deadline_s=600.0)
            for i in range(N_STREAMS)
        ]
        for streamed in streams:
            await streamed.reached(1)


async def test_work_of_a_killed_client_is_stopped_after_its_grace(tmp_path: Path) -> None:
    async with small_fleet(tmp_path, SOON_S) as client:
        await live_and_die(DOOMED, client.connection.settings.router)
        await runs_nothing(client)
        assert (await client.status()).n_clients == 1


async def test_within_its_grace_a_killed_client_may_come_back_to_its_work(tmp_path: Path) -> None:
    async with small_fleet(tmp_path, NEVER_S) as client:
        await live_and_die(DOOMED, client.connection.settings.router)
        # Long enough for somebody who said goodbye.
        await live_and_leave(client.connection.settings.router)
        status = await status_when(client, lambda status: status.n_running <= N_STREAMS)
        assert (status.n_running, status.n_clients) == (N_STREAMS, 2)


async def test_work_of_a_client_that_leaves_is_stopped_without_a_grace(tmp_path: Path) -> None:
    async with small_fleet(tmp_path, NEVER_S) as client:
        await live_and_leave(client.connection.settings.router)
        await runs_nothing(client)
        assert (await client.status()).n_clients == 1
