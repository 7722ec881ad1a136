"""A router dies, or stands still, in the middle of requests: its standby takes the fleet over."""

import asyncio
import os
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import rolloutbus
from rolloutbus import RolloutClient, WeightPublisher
from rolloutbus.bus.actor.child import ProcessSpec
from rolloutbus.bus.actor.process import read_notice
from rolloutbus.bus.actor.supervisor import Supervisor
from rolloutbus.bus.security.key_files import router_addresses_beside
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.wire.errors import BusError, PeerLost
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.events import Finished
from rolloutbus.launcher.plan import environment, python
from rolloutbus.router.settings import PairSettings, RouterSettings
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.store.settings import StoreSettings
from rolloutbus.types import Subscriber
from tests.integration.key_directory import KeyDirectory
from tests.integration.killed_trainer import WEIGHTS
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    assert_fake_rollout,
    fake_sampling,
    serves_at,
    status_when,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

N_REQUESTS, N_TOKENS, HELD_AT = 100, 20, 5
WORKERS = ("w0", "w1")


class Keys:
    """Security settings of each actor; the two routers have one key."""

    def __init__(self, directory: Path, *, are_used: bool) -> None:
        self._keys = KeyDirectory(directory) if are_used else None
        if self._keys is not None:
            self._router = self._keys.make_unlisted("router")
            self._keys.add("store", "store")
            self._keys.add("drill", "trainer")
            for name in WORKERS:
                self._keys.add(name, "worker")

    def file(self, name: str) -> str:
        """Path of its key file; empty without keys."""
        return "" if self._keys is None else str(self._keys.file(name))

    def of(self, name: str) -> SecuritySettings | None:
        if self._keys is None:
            return None
        if name == "router":
            return self._keys.server_settings(name, self._router)
        return self._keys.client_settings(name, self._router)


class RouterProcess:
    """A router that nobody starts again, and what it says."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def says(self, words: str) -> None:
        """Wait for a sentence."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stdout.readline():
                if words in read_notice(line):
                    return
        raise AssertionError(f"it ended and never said {words!r}")


@pytest.fixture
def short_path() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="rb-") as path:
        yield Path(path)


def command_of(module: str, settings: msgspec.Struct) -> list[str]:
    return [*python(module), "--settings-json", msgspec.json.encode(settings).decode()]


@asynccontextmanager
async def router_process(settings: RouterSettings) -> AsyncGenerator[RouterProcess]:
    process = await asyncio.create_subprocess_exec(
        *command_of("rolloutbus.router", settings), stdout=PIPE, env=environment()
    )
    try:
        await serves_at(process)
        yield RouterProcess(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


class Fleet:
    """Two routers, a store and two workers; each of these knows both routers."""

    def __init__(self, path: Path, keys: Keys, hold: TokenLimit) -> None:
        self.path, self.keys, self.hold = path, keys, hold
        self.frontends = [f"ipc://{path}/front-{n}" for n in (0, 1)]
        self.backends = [f"ipc://{path}/back-{n}" for n in (0, 1)]
        self.address = ",".join(self.frontends)

    def router(self, n: int) -> RouterSettings:
        return RouterSettings(
            self.frontends[n],
            self.backends[n],
            pair=PairSettings(self.frontends[1 - n], is_first=n == 0),
            security=self.keys.of("router"),
            exit_with_parent=True,
        )

    def members(self) -> list[ProcessSpec]:
        backends = ",".join(self.backends)
        store = StoreSettings(
            router=backends,
            directory=str(self.path / "store"),
            security=self.keys.of("store"),
            exit_with_parent=True,
        )
        commands = {"store": command_of("rolloutbus.trainer_adapter.store", store)}
        for name in WORKERS:
            worker = WorkerSettings(
                name=name,
                router=backends,
                engine="fake",
                engine_options={"hold_file": str(self.hold.path), "slots": 64},
                security=self.keys.of(name),
                exit_with_parent=True,
            )
            commands[name] = command_of("rolloutbus.engine_worker", worker)
        return [
            ProcessSpec(name, command, self.path / f"{name}.log", environment())
            for name, command in commands.items()
        ]

    def client(self, *, router: str = "", connect_timeout_s: float = DEADLINE_S) -> RolloutClient:
        settings = ClientSettings(
            name="drill",
            router=router or self.address,
            overtime_s=DEADLINE_S,
            connect_timeout_s=connect_timeout_s,
            security=self.keys.of("drill"),
        )
        return RolloutClient(settings)

    def watcher(self) -> Subscriber:
        """Of the client's requests."""
        key_file = self.keys.file("drill")
        return rolloutbus.subscribe(self.address, clients=["drill"], key_file=key_file)


async def took_over(client: RolloutClient, epoch: int) -> float:
    """Seconds until a router of a higher epoch has all members and places requests."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    async with asyncio.timeout(
        START_S
    ):  # a question that a dead router swallowed may take a minute
        while True:
            try:
                status = await client.status(deadline_s=1.0)
            except BusError:  # the router is away
                continue
            is_whole = len(status.workers) == len(WORKERS) and status.store is not None
            if status.router_epoch > epoch and is_whole and not status.recovering:
                return loop.time() - began_at
            await asyncio.sleep(0.05)


async def sees_the_ends_of(watcher: Subscriber, rids: set[str]) -> None:
    """The listener still listens, and hears how all these requests end."""
    async with asyncio.timeout(DEADLINE_S):
        while rids:
            event = await anext(watcher)
            if isinstance(event, Finished):
                rids.discard(event.rid)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "has_keys"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)], ids=["kill", "stop"]
)
async def test_requests_end_once_when_the_standby_takes_over(
    short_path: Path, fault: signal.Signals, *, has_keys: bool
) -> None:
    hold = TokenLimit(short_path / "hold")
    fleet = Fleet(short_path, Keys(short_path, are_used=has_keys), hold)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(router_process(fleet.router(0)))
        second = await stack.enter_async_context(router_process(fleet.router(1)))
        supervisor = await stack.enter_async_context(Supervisor())
        supervisor.start(*fleet.members())
        await supervisor.wait_ready(START_S)
        client = await stack.enter_async_context(fleet.client())
        before = await status_when(client, lambda status: status.standby == "ready")
        if has_keys:
            left = router_addresses_beside(fleet.keys.file("router"))
            assert left.frontend == fleet.address
        watcher = await stack.enter_async_context(fleet.watcher())

        prompts = [[n, 1, 2, 3] for n in range(N_REQUESTS)]
        with hold.at(HELD_AT):
            tasks = [
                asyncio.ensure_future(
                    client.generate(each, fake_sampling(N_TOKENS), deadline_s=3 * DEADLINE_S)
                )
                for each in prompts
            ]
            await status_when(client, lambda status: status.n_running == N_REQUESTS)
            os.kill(first.process.pid, fault)
            seconds = await took_over(client, before.router_epoch)
            await second.says("this one takes over")
        print(f"taken over, and recovered, after {seconds:.1f} s")
        rollouts = await asyncio.gather(*tasks)
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            assert_fake_rollout(prompt, rollout, N_TOKENS)
        await sees_the_ends_of(watcher, {each.rid for each in rollouts})
        published = await WeightPublisher(client).publish(
            WEIGHTS, require="all", deadline_s=DEADLINE_S
        )
        assert set(published.transport) == set(WORKERS)
        after = await status_when(client, lambda status: status.standby == "missing")
        assert after.committed == {"default": published.version}

        if fault == signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            await first.says("stands by from now on")
            alone = fleet.client(router=fleet.frontends[0], connect_timeout_s=10.0)
            with pytest.raises(PeerLost, match="stands by for another one: name that one's"):
                await alone.open()
            rollout = await client.generate([7], fake_sampling(3), deadline_s=DEADLINE_S)
            assert set(rollout.token_versions.tolist()) == {published.version}
            last = await status_when(client, lambda status: status.standby == "ready")
            assert (last.instance, last.router_epoch) == (after.instance, after.router_epoch)


async def test_a_fleet_with_a_standby_goes_on_when_its_router_dies() -> None:
    async with rolloutbus.up(workers=1, engine="fake", standby=True) as fleet:
        assert len(fleet.address.split(",")) == len(fleet.backend.split(",")) == 2
        assert {"router", "standby"} < set(fleet.pids)
        async with rolloutbus.connect(fleet.address) as client:
            before = await status_when(client, lambda status: status.standby == "ready")
            fleet.kill_router()
            await status_when(
                client,
                lambda status: status.instance != before.instance and status.standby == "ready",
            )
            rollout = await client.generate([1, 2], fake_sampling(3), deadline_s=DEADLINE_S)
            assert_fake_rollout([1, 2], rollout, 3)
