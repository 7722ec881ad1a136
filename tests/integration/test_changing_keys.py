"""Keys that change or are taken away while a fleet of real processes works."""

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.actor.process import ActorExit
from rolloutbus.bus.transport.endpoints import split_key, with_key
from rolloutbus.cli.app import app
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.launcher import discovery
from rolloutbus.launcher.plan import environment, python
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.types import FleetStatus
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    assert_fake_rollout,
    fake_sampling,
    quiet_addresses,
    serves_at,
    status_when,
    worker_in,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROMPT = [1, 2, 3]


async def test_router_changes_its_key_under_load_without_an_error(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path)
    old, new = keys.make_unlisted("router-old"), keys.make_unlisted("router-new")
    keys.add("w0", "worker")
    keys.add("ann", "client")

    def router(key: str, front: str, back: str) -> RouterActor:
        settings = RouterSettings(front, back, security=keys.server_settings(key))
        return RouterActor(settings, key)

    front, back = quiet_addresses(2)
    async with router("router-old", front, back):
        worker = await worker_process(keys, back, old, new)
        settings = ClientSettings("ann", front, security=keys.client_settings("ann", old, new))
        client = RolloutClient(settings)
        await client.__aenter__()
        load = [asyncio.ensure_future(keep_generating(client)) for _ in range(4)]
        await status_when(client, lambda status: status.n_running > 0)
    async with router("router-new", front, back):
        await status_when(client, lambda status: status.n_running > 0)
        for each in load:
            each.cancel()
        results = await asyncio.gather(*load, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results), results
        assert client.connection.counters.reconnects > 0
        client.connection.close()
        worker.terminate()
        await worker.wait()


@pytest.mark.usefixtures("runtime_dir")
async def test_fleet_goes_on_while_its_router_changes_its_key(tmp_path: Path) -> None:
    front, back = quiet_addresses(2)
    running = rolloutbus.up(
        workers=2,
        engine="fake",
        engine_options={"step_s": 0.002},
        secure=tmp_path,
        address=front,
        backend=back,
    )
    async with running as fleet:
        old_address, key_file = fleet.address, fleet.key_file
        client = rolloutbus.connect(old_address, key_file=key_file)
        await client.__aenter__()
        load = [asyncio.ensure_future(keep_generating(client)) for _ in range(4)]
        new_key = rotated(tmp_path / "router.key")
        assert new_key not in old_address
        # Started between the two: it is told of both keys.
        await comes_back(fleet, client, "w0")
        fleet.kill_router()
        await fleet.wait_ready(START_S)
        assert fleet.address == with_key(split_key(old_address)[0], new_key)
        assert discovery.find_fleet(fleet.name).address == fleet.address
        await comes_back(fleet, client, "w1")
        for address in (old_address, fleet.address):
            async with rolloutbus.connect(address, key_file=key_file) as newcomer:
                await keep_generating(newcomer, n_times=1)
        assert client.connection.counters.reconnects > 0
        assert not any(each.done() for each in load), load
        for each in load:
            each.cancel()
        await asyncio.wait(load)
        client.connection.close()


def rotated(file: Path) -> str:
    """Put a fresh pair in a key file as people do; its public half."""
    result = CliRunner().invoke(app, ["keys", "rotate", str(file)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["new"]


async def comes_back(fleet: Fleet, client: RolloutClient, name: str) -> None:
    """Kill a worker and wait until its successor serves."""
    before = worker_in(await client.status(deadline_s=DEADLINE_S), name)
    fleet.kill(name)

    def is_another(status: FleetStatus) -> bool:
        worker = worker_in(status, name)
        return worker is not None and (before is None or worker.epoch != before.epoch)

    await status_when(client, is_another, START_S)


async def keep_generating(client: RolloutClient, n_times: int = sys.maxsize) -> None:
    for _ in range(n_times):
        rollout = await client.generate(PROMPT, fake_sampling(256), deadline_s=START_S)
        assert_fake_rollout(PROMPT, rollout, 256)


async def worker_process(
    keys: KeyDirectory, back: str, *router_keys: str
) -> asyncio.subprocess.Process:
    settings = WorkerSettings(
        "w0",
        back,
        engine="fake",
        engine_options={"step_s": 0.002},
        security=keys.server_settings("w0", *router_keys),
        exit_with_parent=True,
    )
    process = await asyncio.create_subprocess_exec(
        *python("rolloutbus.engine_worker"),
        "--settings-json",
        msgspec.json.encode(settings).decode(),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    await serves_at(process)
    return process


async def test_revoked_worker_leaves_the_fleet_and_says_why(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path)
    router_key = keys.make_unlisted("router")
    keys.add("w0", "worker")
    anywhere = "tcp://127.0.0.1:0"
    settings = RouterSettings(anywhere, anywhere, security=keys.server_settings("router"))
    async with RouterActor(settings, "router") as router:
        worker = await worker_process(keys, router.endpoints[1], router_key)
        assert len(router.core.status(0.0).workers) == 1
        keys.revoke("w0")
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.wait() == ActorExit.FORBIDDEN
        assert router.core.status(0.0).workers == []
