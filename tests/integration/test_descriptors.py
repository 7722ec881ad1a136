"""A router that is flooded with connections keeps its peers, and takes new ones when it is over."""

import asyncio
import contextlib
import resource
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from rolloutbus import RolloutClient
from rolloutbus.bus.actor.resources import RESERVE_FDS
from rolloutbus.launcher.plan import environment, python
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import (
    DEADLINE_S,
    PACE_S,
    PATIENT,
    START_S,
    n_held,
    serves_at,
    status_when,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * START_S)]

ANY = "tcp://127.0.0.1:0"
N_STRANGERS = 200
N_ADMITTED = 20
"""About so many find a descriptor."""
LEASES = replace(PATIENT, silence_s=20.0)
"""A client that made a fresh connection meanwhile would be turned away as well."""


class Stranger:
    """A connection that says nothing and never goes by itself."""

    def __init__(self) -> None:
        self.is_cut = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def come(self, host: str, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection(host, port)
        self._task = asyncio.create_task(self._stay())

    async def go(self) -> None:
        if self._writer is None or self._task is None:
            return
        self._writer.close()
        await self._task
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _stay(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._reader.read(-1)
        self.is_cut.set()


class Router:
    """A router process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @property
    def n_fds(self) -> int:
        return n_held("fd", self.process.pid)

    def leave_room_for(self, n_links: int) -> int:
        """Lower what the system allows it; returns how many descriptors it may have."""
        limit = self.n_fds + n_links + RESERVE_FDS
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        return limit

    def client(self, name: str) -> RolloutClient:
        settings = ClientSettings(name, self.address, lease=LEASES, connect_timeout_s=START_S)
        return RolloutClient(settings)


@pytest_asyncio.fixture
async def router() -> AsyncIterator[Router]:
    chosen = RouterSettings(ANY, ANY, leases=LEASES, exit_with_parent=True)
    settings = msgspec.json.encode(chosen).decode()
    command = [*python("rolloutbus.router"), "--settings-json", settings]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=environment())
    yield Router(process, (await serves_at(process))["frontend"])
    process.terminate()
    async with asyncio.timeout(DEADLINE_S):
        assert await process.wait() == 0


async def n_clients_seen_by(client: RolloutClient) -> int:
    async with client:
        return (await client.status()).n_clients


@pytest_asyncio.fixture
async def strangers() -> AsyncIterator[list[Stranger]]:
    made = [Stranger() for _ in range(N_STRANGERS)]
    yield made
    for stranger in made:
        await stranger.go()


async def test_a_flood_of_connections_leaves_clients_served_and_the_reserve_unused(
    router: Router, strangers: list[Stranger]
) -> None:
    address = urlsplit(router.address)
    assert address.hostname is not None
    assert address.port is not None
    async with router.client("early") as early, asyncio.timeout(START_S):
        limit = router.leave_room_for(N_ADMITTED)
        for stranger in strangers:
            await stranger.come(address.hostname, address.port)
        late = asyncio.create_task(n_clients_seen_by(router.client("late")))
        for stranger in strangers[2 * N_ADMITTED :]:
            await stranger.is_cut.wait()
        few = N_STRANGERS - 2 * N_ADMITTED
        await status_when(early, lambda status: status.counters.get("turned_away", 0) >= few)
        # Nothing tells when another process closes a descriptor.
        while router.n_fds > limit - RESERVE_FDS + 1:  # noqa: ASYNC110
            await asyncio.sleep(PACE_S)

        for stranger in strangers:
            await stranger.go()
        assert await late == 2
