"""A second router, started by hand while the first one lives, ends; the fleet does not notice."""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from rolloutbus import RolloutClient
from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.actor.process import ActorExit
from rolloutbus.bus.actor.supervisor import Supervisor
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.launcher.plan import environment, python
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.drills.chaos.proxy import ProxyLink
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
    serves_at,
    status_when,
    worker_in,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(5 * START_S)]

LEASES = LeaseSettings(lease_s=60.0, holder_s=48.0, recovery_s=60.5)
"""A busy machine may take its time on the way back to the first router."""
ANY_PORT = "tcp://127.0.0.1:0"
BESIDE_S = 3.0
"""So long after the second router's start the first one is seen to live: answers are younger."""
PROMPT, N_TOKENS, HELD_AT = [1, 2, 3], 40, 5


@dataclass
class Small:
    """A router and a worker, a client, and the links that lead both to the router."""

    client: RolloutClient
    links: dict[str, ProxyLink]
    endpoints: dict[str, str]
    """Of the first router."""

    def lead(self, who: str, endpoints: dict[str, str]) -> None:
        """From now on `worker` or `client` gets to another router; its present link breaks."""
        link = self.links[who]
        link.upstream = endpoints["backend" if who == "worker" else "frontend"]
        link.reset()


def command_of(module: str, settings: msgspec.Struct) -> list[str]:
    return [*python(module), "--settings-json", msgspec.json.encode(settings).decode()]


@asynccontextmanager
async def small_fleet(path: Path, token_limit: TokenLimit) -> AsyncGenerator[Small]:
    """One worker with a fake engine that stops at `token_limit`."""
    settings = RouterSettings(ANY_PORT, ANY_PORT, leases=LEASES, exit_with_parent=True)
    async with ProxyLink() as to_worker, ProxyLink() as to_client, Supervisor() as supervisor:
        command = command_of("rolloutbus.router", settings)
        spec = ProcessSpec("router", command, path / "router.log", environment())
        (router,) = supervisor.start(spec)
        await supervisor.wait_ready(START_S)
        to_worker.upstream = router.endpoints["backend"]
        to_client.upstream = router.endpoints["frontend"]
        worker = WorkerSettings(
            name="w0",
            router=to_worker.endpoint,
            stream=f"ipc://{path}/s",
            engine="fake",
            engine_options={"hold_file": str(token_limit.path)},
            lease=LEASES,
            exit_with_parent=True,
        )
        command = command_of("rolloutbus.engine_worker", worker)
        supervisor.start(ProcessSpec("w0", command, path / "w0.log", environment()))
        await supervisor.wait_ready(START_S)
        own = ClientSettings(
            name="drill",
            router=to_client.endpoint,
            lease=LEASES,
            connect_timeout_s=DEADLINE_S,
            control_deadline_s=DEADLINE_S,
            overtime_s=DEADLINE_S,
        )
        async with RolloutClient(own) as client:
            links = {"worker": to_worker, "client": to_client}
            yield Small(client, links, router.endpoints)


async def start_router(settings: RouterSettings) -> Process:
    return await asyncio.create_subprocess_exec(
        *command_of("rolloutbus.router", settings), stdout=PIPE, stderr=PIPE, env=environment()
    )


async def ending_of(process: Process) -> tuple[int, str]:
    """(exit status, what it said on stderr)."""
    async with asyncio.timeout(START_S):  # it may have to start before
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def first_router_lives_on(client: RolloutClient) -> None:
    """Wait until it has had, and answered, heartbeats that were sent since now."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()

    def is_old_enough(beat_age_ms: int) -> bool:
        return loop.time() - beat_age_ms / 1000 > began_at + BESIDE_S

    await status_when(
        client, lambda status: any(is_old_enough(each.beat_age_ms) for each in status.workers)
    )


@pytest.mark.parametrize(("who", "name"), [("worker", "w0"), ("client", "drill")])
async def test_second_router_is_told_by_whoever_strays_to_it(
    who: str, name: str, tmp_path: Path
) -> None:
    token_limit = TokenLimit(tmp_path / "hold")
    async with small_fleet(tmp_path, token_limit) as small:
        client = small.client
        with token_limit.at(HELD_AT):
            streamed = Streamed(client, PROMPT, fake_sampling(N_TOKENS), deadline_s=4 * START_S)
            await streamed.reached(1)
            before = worker_in(await client.status(), "w0")
            second = await start_router(RouterSettings(ANY_PORT, ANY_PORT, exit_with_parent=True))
            try:
                endpoints = await serves_at(second)
                await first_router_lives_on(client)
                small.lead(who, endpoints)
                status, said = await ending_of(second)
            finally:
                if second.returncode is None:
                    second.kill()
            small.lead(who, small.endpoints)
        assert status == ActorExit.REJECTED
        assert said.startswith(f"error: another router holds this fleet: {name} obeys router")
        assert said.count("\n") == 1
        rollout = await streamed.rollout()
        assert_fake_rollout(PROMPT, rollout, N_TOKENS)
        assert (rollout.n_attempts, client.connection.counters.lost) == (1, 0)
        after = await client.status(deadline_s=DEADLINE_S)
        worker = worker_in(after, "w0")
        assert before is not None
        assert worker is not None
        assert worker.epoch == before.epoch
        assert after.counters["joins"] == 1


async def test_second_router_at_the_same_address_says_so_in_one_line(tmp_path: Path) -> None:
    async with RouterActor(RouterSettings(ANY_PORT, f"ipc://{tmp_path}/back"), "first") as first:
        address = first.endpoints[0]
        again = RouterSettings(address, f"ipc://{tmp_path}/other", exit_with_parent=True)
        status, said = await ending_of(await start_router(again))
    assert status == ActorExit.SETTINGS
    assert said == f"error: cannot listen on {address}: Address already in use\n"


async def test_a_second_router_does_not_take_the_ipc_path_of_the_first(tmp_path: Path) -> None:
    settings = RouterSettings(f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/back")
    async with RouterActor(settings, "first"):
        with pytest.raises(SettingsError, match="front: Address already in use"):
            await RouterActor(settings, "second").__aenter__()
