"""Who cannot reach a router is told why, on both sides, and at once."""

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest

from rolloutbus import RolloutClient
from rolloutbus.bus.actor.process import ActorExit
from rolloutbus.bus.transport.endpoints import split_key
from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.launcher.plan import environment, python
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import START_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

ANY_PORT = "tcp://127.0.0.1:0"
NOBODY = "tcp://127.0.0.1:1"
NEVER_S = 200.0
"""A client that is turned away does not wait for so long."""


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    keys = KeyDirectory(tmp_path)
    keys.add("router", "admin")
    keys.add("w0", "worker")
    keys.make_unlisted("nobody")
    return keys


async def worker_says(settings: WorkerSettings, sentence: str) -> None:
    """Start a worker and wait until it says this on stderr."""
    text = msgspec.json.encode(settings).decode()
    process = await asyncio.create_subprocess_exec(
        *python("rolloutbus.engine_worker"), "--settings-json", text, stderr=PIPE, env=environment()
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(START_S):
            while sentence not in (line := await process.stderr.readline()).decode():
                assert line, "it ended before"
    finally:
        process.kill()
        await process.wait()


async def test_a_worker_without_a_router_says_so(tmp_path: Path) -> None:
    stream = f"ipc://{tmp_path}/stream"
    settings = WorkerSettings(name="w0", router=NOBODY, stream=stream, engine="fake")
    await worker_says(settings, f"warning: no router answers at {NOBODY}")


async def test_new_worker_of_a_revoked_key_ends_and_says_why(
    keys: KeyDirectory,
) -> None:
    keys.revoke("w0")  # before the router begins, which looks at the list once in a while
    settings = RouterSettings(ANY_PORT, ANY_PORT, security=keys.server_settings("router"))
    async with RouterActor(settings, "r") as router:
        worker = WorkerSettings(
            name="w0",
            router=router.endpoints[1],
            stream=ANY_PORT,
            engine="fake",
            security=keys.server_settings("w0"),
            key_patience_s=0.5,
        )
        text = msgspec.json.encode(worker).decode()
        process = await asyncio.create_subprocess_exec(
            *python("rolloutbus.engine_worker"),
            *("--settings-json", text),
            stderr=PIPE,
            env=environment(),
        )
        async with asyncio.timeout(START_S):
            _, said = await process.communicate()
    assert process.returncode == ActorExit.FORBIDDEN
    first, *_, last = [
        line for line in said.decode().splitlines() if "does not know this key" in line
    ]
    assert first.startswith("warning: ")
    assert last.startswith("error: ")
    assert last.endswith("given up after 0.5 s")


async def test_who_has_no_key_is_told_how_to_give_one(keys: KeyDirectory) -> None:
    settings = RouterSettings(ANY_PORT, ANY_PORT, security=keys.server_settings("router"))
    async with RouterActor(settings, "r") as router:
        address, _ = split_key(router.endpoints[0])
        own = ClientSettings(name="c", router=address, connect_timeout_s=2.0)
        with pytest.raises(PeerLost, match=rf"without keys.*--key FILE.*key_file=.*{address}#KEY"):
            await RolloutClient(own).__aenter__()


async def test_who_has_no_place_at_a_router_is_told_why_on_both_sides(
    keys: KeyDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = RouterSettings(ANY_PORT, ANY_PORT, security=keys.server_settings("router"))
    async with RouterActor(settings, "r") as router:
        frontend, backend = router.endpoints
        for name, why in (("nobody", "does not know this key"), ("w0", "key is not a client's")):
            own = ClientSettings(
                name="c",
                router=frontend,
                security=keys.client_settings(name),
                connect_timeout_s=NEVER_S,
            )
            with pytest.raises(PeerLost, match=why):
                await RolloutClient(own).__aenter__()
        worker = WorkerSettings(
            name="w1",
            router=backend,
            stream=ANY_PORT,
            engine="fake",
            security=keys.server_settings("nobody"),
        )
        await worker_says(worker, "does not know this key")
    said = capfd.readouterr().err
    assert "not in the allow-list was turned away at the frontend" in said
    assert "the worker's key of 'w0' has no place at the frontend" in said
    assert "not in the allow-list was turned away at the backend" in said
