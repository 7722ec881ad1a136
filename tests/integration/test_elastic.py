"""A fleet that grows, shrinks and is exchanged under load: its clients see no error."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import rolloutbus
from rolloutbus import Fleet, Rollout, RolloutClient, WeightPublisher
from rolloutbus.errors import ActorStopped, BusError, ProcessFailed, SettingsError
from rolloutbus.examples import autoscale
from rolloutbus.launcher.control_socket import CONTROL, Scale, Step, ask
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetStatus
from tests.integration.live_fleet import (
    DEADLINE_S,
    PACE_S,
    START_S,
    Changes,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
    process_ends,
    status_when,
    worker_in,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

SLOTS = 4
FLEET: UpOptions = {
    "workers": 2,
    "engine": "fake",
    "engine_options": {"slots": SLOTS, "step_s": 0.002},
}
WEIGHTS = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
N_TOKENS = 20
N_TURNS = 8
LONGER = fake_sampling(N_TOKENS)
LOAD_S = 600.0
"""Deadline of rollouts that wait for a change of the fleet."""


class Load:
    """Clients of a fleet that ask all the time, and check what comes."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self.rollouts: list[Rollout] = []
        self.committed = 0
        """The last version whose publication has ended."""
        self.n_wanted = 0
        self._changes = Changes()
        self._is_over = False
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def workers(self) -> set[str]:
        return {rollout.worker for rollout in self.rollouts}

    @contextlib.asynccontextmanager
    async def running(self, n_askers: int = 12, n_talks: int = 8) -> AsyncGenerator[None]:
        """Inside they ask; leaving waits for `n_wanted` rollouts. An error ends the block."""
        self._is_over = False
        async with asyncio.TaskGroup() as tasks:
            for number in range(n_askers):
                tasks.create_task(self._ask(number))
            for number in range(n_talks):
                tasks.create_task(self._converse(f"talk-{number}"))
            yield
            self._is_over = True

    async def sampled(self, n_more: int) -> None:
        """Wait until so many more rollouts came."""
        n = len(self.rollouts) + n_more
        await self._changes.until(lambda: len(self.rollouts) >= n)

    async def publish(self) -> None:
        """One update of the weights."""
        published = await WeightPublisher(self._client).publish(WEIGHTS, deadline_s=LOAD_S)
        self.committed = published.version

    async def _ask(self, number: int) -> None:
        n_asked = 0
        while not self._is_done:
            n_asked += 1
            await self._sampled([number, n_asked], self._client.generate)

    async def _converse(self, name: str) -> None:
        """One session after the other; each turn continues the one before."""
        n_sessions = 0
        while not self._is_done:
            n_sessions += 1
            prompt = [7, n_sessions]
            async with self._client.session(f"{name}.{n_sessions}") as session:
                for _ in range(N_TURNS):
                    rollout = await self._sampled(prompt, session.generate)
                    prompt = [*prompt, *rollout.tokens.tolist()]

    async def _sampled(
        self, prompt: list[int], ask: Callable[..., Coroutine[Any, Any, Rollout]]
    ) -> Rollout:
        least = self.committed
        rollout = await ask(prompt, fake_sampling(N_TOKENS), versions="latest", deadline_s=LOAD_S)
        assert_fake_rollout(prompt, rollout, N_TOKENS)
        assert min(rollout.token_versions) >= least, "weights older than what was committed"
        self.rollouts.append(rollout)
        self._changes.notify()
        return rollout

    @property
    def _is_done(self) -> bool:
        return self._is_over and len(self.rollouts) >= self.n_wanted


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def two_workers(fleet: Fleet) -> None:
    """Each test begins with w0 and w1."""
    if fleet.worker_names != ["w0", "w1"]:
        await fleet.scale(1)
        await fleet.scale(2)
    assert fleet.worker_names == ["w0", "w1"]


def variables_of(pid: int) -> list[str]:
    """The environment that a process began with, `NAME=VALUE` each."""
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def names_in(client: RolloutClient) -> set[str]:
    return {worker.name for worker in (await client.status()).workers}


async def test_workers_come_and_go_under_load(
    fleet: Fleet, client: RolloutClient, is_exhaustive: bool
) -> None:
    n_most = 8 if is_exhaustive else 4
    load = Load(client)
    load.n_wanted = 2000 if is_exhaustive else 200
    async with load.running():
        await load.publish()
        async with asyncio.TaskGroup() as both:  # workers join while a version is on its way
            both.create_task(fleet.scale(n_most))
            for _ in range(3):
                await load.publish()
        assert await names_in(client) == {f"w{number}" for number in range(n_most)}
        # An update need not wait for all of them, and ends with those that it does not wait for.
        await status_when(
            client, lambda s: {each.version for each in s.workers} == {load.committed}
        )
        await load.sampled(load.n_wanted // 2)
        await fleet.scale(2)
        assert await names_in(client) == {"w0", "w1"}
    assert len(load.rollouts) >= load.n_wanted
    assert load.workers == {f"w{number}" for number in range(n_most)}
    assert set(fleet.pids) == {"router", "store", "w0", "w1"}
    assert (await client.status()).absent == {}


async def test_a_worker_that_joins_while_a_version_is_on_its_way_serves_that_one(
    fleet: Fleet, client: RolloutClient
) -> None:
    publisher = WeightPublisher(client)
    before = await publisher.publish(WEIGHTS, deadline_s=LOAD_S)
    [host] = fleet.host_pids("w0")
    os.kill(host, signal.SIGSTOP)  # it cannot prepare, so the update waits for it
    try:
        publishing = asyncio.create_task(publisher.publish(WEIGHTS, deadline_s=LOAD_S))
        await status_when(client, lambda s: len(s.updates) == 1)
        adding = asyncio.create_task(fleet.add_worker())
        status = await status_when(client, lambda s: is_blocked(s, "w2", "behind"), START_S)
        assert not adding.done()
        assert status.committed["default"] == before.version
    finally:
        os.kill(host, signal.SIGCONT)
    published = await publishing
    assert await adding == "w2"
    rollout = await client.generate(
        [8], fake_sampling(3), worker="w2", versions="any", deadline_s=DEADLINE_S
    )
    assert rollout.version_runs == [(published.version, 3)]


def is_blocked(status: FleetStatus, name: str, reason: str) -> bool:
    worker = worker_in(status, name)
    return worker is not None and reason in worker.blocked_by


async def test_sessions_of_a_worker_that_leaves_are_moved_and_told_so(
    fleet: Fleet, client: RolloutClient
) -> None:
    name = await fleet.add_worker()
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(client.session(f"s{number}")) for number in range(6)
        ]
        there = [session for session in sessions if session.worker == name]
        assert there
        await fleet.remove_worker(name)
        for session in sessions:
            await session.generate([1], fake_sampling(3), deadline_s=DEADLINE_S)
            assert session.worker != name
        assert {session.last_move and session.last_move.reason for session in there} == {"draining"}


async def test_a_worker_that_is_killed_while_it_drains_costs_nobody_anything(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    name = await fleet.add_worker()
    pid = fleet.pids[name]
    async with contextlib.AsyncExitStack() as stack:
        streams: list[Streamed] = []
        with token_limit.at(5):
            for number in range(6):  # sessions are spread evenly
                await stack.enter_async_context(client.session(f"k{number}"))
                streams.append(Streamed(client, [1, number], LONGER, session=f"k{number}"))
                await streams[-1].reached(5)
            assert [stream.worker for stream in streams].count(name) == 2
            removing = asyncio.create_task(fleet.remove_worker(name))
            await status_when(client, lambda s: is_in_state(s, name, "draining"))
            assert fleet.worker_names == ["w0", "w1"]
            os.kill(pid, signal.SIGKILL)
            await removing
        for number, stream in enumerate(streams):
            assert_fake_rollout([1, number], await stream.rollout(), N_TOKENS)
            assert stream.is_contiguous
    assert name not in fleet.pids
    status = await client.status()
    assert (worker_in(status, name), status.absent) == (None, {})


def is_in_state(status: FleetStatus, name: str, state: str) -> bool:
    worker = worker_in(status, name)
    return worker is not None and worker.state == state


async def test_what_is_not_done_in_time_goes_on_elsewhere(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    with token_limit.at(5):
        stream = Streamed(client, [3, 4], LONGER)
        await stream.reached(5)
        await fleet.restart(stream.worker, drain_s=0.2)
    assert_fake_rollout([3, 4], await stream.rollout(), N_TOKENS)
    assert fleet.worker_names == ["w0", "w1"]


async def test_a_restart_keeps_place_and_environment_and_whoever_names_the_worker_waits(
    fleet: Fleet, client: RolloutClient
) -> None:
    name = await fleet.add_worker(env={"COLOUR": "green"})
    assert name == "w2"
    before = fleet.pids[name]
    restarting = asyncio.create_task(fleet.restart(name))
    await process_ends(before)
    rollout = await client.generate([5], fake_sampling(3), worker=name, deadline_s=DEADLINE_S)
    assert rollout.worker == name
    await restarting
    for pid in (fleet.pids[name], *fleet.host_pids(name)):
        assert pid != before
        assert "COLOUR=green" in variables_of(pid)


@pytest.fixture
def stand_in_release(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Makes an environment whose Python runs some lines at its start, as another release would."""

    def make(lines: str) -> dict[str, str]:
        (tmp_path / "sitecustomize.py").write_text(lines)
        path = environment().get("PYTHONPATH", "")
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), path]))}

    return make


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spoken", [(1, 2), (3, 4)], ids=["before", "after"])
async def test_workers_are_exchanged_for_those_of_a_neighbouring_release(
    fleet: Fleet,
    client: RolloutClient,
    spoken: tuple[int, int],
    stand_in_release: Callable[[str], dict[str, str]],
) -> None:
    other = stand_in_release(f"import rolloutbus.bus.wire.codec as c\nc.SPOKEN = {spoken}")
    load = Load(client)
    async with load.running():
        await load.publish()
        came: list[str] = []
        for name in ("w0", "w1"):
            came.append(await fleet.add_worker(env=other))
            await fleet.remove_worker(name)
        await load.publish()
        load.n_wanted = len(load.rollouts) + 50
    assert {rollout.worker for rollout in load.rollouts[-20:]} <= set(came)
    # The lowest free number is w0's again.
    assert sorted(fleet.worker_names) == sorted(came)


async def test_a_worker_that_cannot_start_is_told_and_the_others_go_on(
    fleet: Fleet, client: RolloutClient, stand_in_release: Callable[[str], dict[str, str]]
) -> None:
    broken = stand_in_release(
        "import os, sys; print('error: no boat', file=sys.stderr); os._exit(4)"
    )
    with pytest.raises(ProcessFailed, match="w2: no boat"):
        await fleet.add_worker(env=broken)
    assert fleet.worker_names == ["w0", "w1"]
    assert set(fleet.pids) == {"router", "store", "w0", "w1"}
    await client.generate([1], fake_sampling(3), deadline_s=DEADLINE_S)


async def test_a_worker_whose_files_cannot_be_written_is_told_and_the_others_go_on(
    fleet: Fleet, client: RolloutClient
) -> None:
    for path in (fleet.run_dir / "w2.json", fleet.run_dir / "logs" / "w2.log"):
        path.unlink(missing_ok=True)
        path.mkdir()
        with pytest.raises(BusError, match=r"w2: it cannot be started: .*Is a directory"):
            async for _ in ask(fleet.run_dir / CONTROL, Scale(3, DEADLINE_S)):
                pass
        assert set(fleet.pids) == {"router", "store", "w0", "w1"}
        path.rmdir()
    await client.generate([1], fake_sampling(3), deadline_s=DEADLINE_S)


async def test_a_change_that_is_cancelled_leaves_no_new_worker(fleet: Fleet) -> None:
    adding = asyncio.create_task(fleet.scale(4))
    pids = [0]
    async with asyncio.timeout(DEADLINE_S):
        while not all(pids):
            await asyncio.sleep(PACE_S)  # processes that start tell the fleet's own listener only
            pids = [fleet.pids.get(name, 0) for name in ("w2", "w3")]
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    for pid in pids:
        await process_ends(pid)
    assert fleet.worker_names == ["w0", "w1"]


async def test_a_worker_leaves_although_the_order_was_given_up_before_it_heard_of_it(
    fleet: Fleet, client: RolloutClient
) -> None:
    pid, router = fleet.pids["w1"], fleet.pids["router"]
    os.kill(router, signal.SIGSTOP)
    try:
        order = ask(fleet.run_dir / CONTROL, Scale(1, DEADLINE_S))
        first = await anext(order)
        await order.aclose()
    finally:
        os.kill(router, signal.SIGCONT)
    assert first == Step("w1", "drains: it finishes what it runs")
    await process_ends(pid)
    await has_gone(fleet, "w1")
    await status_when(client, lambda s: worker_in(s, "w1") is None and not s.absent)


async def has_gone(fleet: Fleet, name: str) -> None:
    """Wait until its place is free."""
    async with asyncio.timeout(DEADLINE_S):
        while name in fleet.pids:  # noqa: ASYNC110 - who gave the order up is told nothing
            await asyncio.sleep(PACE_S)


async def test_a_worker_whose_restart_is_given_up_is_not_expected_back(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    with token_limit.at(5):
        stream = Streamed(client, [5, 6], LONGER)
        await stream.reached(5)
        name = stream.worker
        restarting = asyncio.create_task(fleet.restart(name))
        await status_when(client, lambda s: is_in_state(s, name, "draining"))
        restarting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restarting
    assert_fake_rollout([5, 6], await stream.rollout(), N_TOKENS)
    await has_gone(fleet, name)
    await status_when(client, lambda s: worker_in(s, name) is None and not s.absent)


async def test_what_cannot_be_is_refused_in_a_sentence(fleet: Fleet) -> None:
    with pytest.raises(SettingsError, match="workers: at least 1 is needed"):
        await fleet.scale(0)
    with pytest.raises(SettingsError, match="workers: 100000000 are too many; at most 10000"):
        await fleet.scale(100_000_000)
    for change in (fleet.restart, fleet.remove_worker):
        with pytest.raises(SettingsError, match="no worker 'w7': there are w0, w1"):
            await change("w7")
    with pytest.raises(SettingsError, match="drain_s: 0 is not above 0"):
        await fleet.scale(1, drain_s=0)
    with pytest.raises(SettingsError, match=r"gpus: \[0, 0\] is no group"):
        await fleet.add_worker(gpus=[0, 0])
    with pytest.raises(SettingsError, match="follows from gpus"):
        await fleet.add_worker(gpus=[0], env={"CUDA_VISIBLE_DEVICES": "1"})
    await fleet.scale(1)
    with pytest.raises(SettingsError, match="w0 is the last worker"):
        await fleet.remove_worker("w0")
    with pytest.raises(ActorStopped, match="the fleet does not run"):
        await rolloutbus.up(engine="fake").scale(2)


async def test_workers_follow_the_queue(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    sizes = asyncio.Queue[int]()
    rule = autoscale.Rule(least=1, most=3, look_s=0.05, patience=2)
    await fleet.scale(1)

    def tell(sentence: str) -> None:
        sizes.put_nowait(int(sentence.partition(" -> ")[2].removesuffix(" workers")))

    prompts = [[1, number] for number in range(12 * SLOTS)]
    async with asyncio.timeout(LOAD_S), asyncio.TaskGroup() as tasks:
        with token_limit.at(5):
            following = tasks.create_task(autoscale.follow(fleet, client, rule, tell))
            asking = tasks.create_task(client.generate_batch(prompts, LONGER, deadline_s=LOAD_S))
            assert await sizes.get() == 3
            await status_when(client, lambda s: len(s.workers) == 3, START_S)
        assert all(len(rollout.tokens) == N_TOKENS for (rollout,) in await asking)
        while await sizes.get() != 1:
            pass
        await fleet.scale(1)  # after the change that is under way
        following.cancel()
    assert {worker.name for worker in (await client.status()).workers} == {"w0"}


async def test_new_workers_of_a_guarded_fleet_have_keys_and_a_lost_router_is_waited_for(
    tmp_path: Path,
) -> None:
    async with rolloutbus.up(
        engine="fake", workers=1, store=False, secure=tmp_path / "keys"
    ) as fleet:
        await fleet.scale(2)
        fleet.kill_router()
        await fleet.restart("w1")
        async with rolloutbus.connect(fleet.address, key_file=fleet.key_file) as client:
            # Of the next router w1 alone was waited for.
            await status_when(client, lambda s: {each.name for each in s.workers} == {"w0", "w1"})


async def test_each_worker_sees_its_gpus_and_there_are_no_more_workers_than_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    async with rolloutbus.up(engine="fake", workers=1, store=False, gpus=[[2], [0, 1]]) as fleet:
        await fleet.scale(2)
        for name, names in (("w0", "6"), ("w1", "4,5")):
            assert f"CUDA_VISIBLE_DEVICES={names}" in variables_of(fleet.pids[name])
        with pytest.raises(SettingsError, match="no GPUs are left for w2: `gpus` names 2 groups"):
            await fleet.scale(3)
        with pytest.raises(SettingsError, match="no GPU 3: CUDA_VISIBLE_DEVICES lets this process"):
            await fleet.add_worker(gpus=[3])
        assert fleet.worker_names == ["w0", "w1"]
