"""Whatever dies under load, each request ends once and with the right tokens."""

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial

import pytest

import rolloutbus
from rolloutbus import Fleet, Rollout, RolloutClient
from rolloutbus.engine_worker.settings import HostSettings
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.types import FleetStatus
from tests.integration.event_reader import EventReader
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    UNHURRIED,
    Streamed,
    assert_fake_rollout,
    facts_when,
    fake_sampling,
    status_when,
    worker_in,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

N_WORKERS, N_REQUESTS, N_STREAMS = 3, 300, 30
ENGINES = {"slots": 64, "step_s": 0.01}
FLEET: UpOptions = {
    "workers": N_WORKERS,
    "engine": "fake",
    "engine_options": ENGINES,
    "store": False,
    # One that a test stops may be so for as long as the machine needs.
    "host": HostSettings(wedged_s=3 * DEADLINE_S),
}
N_TOKENS = 120
N_BEFORE = 40
"""Tokens of all that runs when disaster strikes: it is held there."""
PROMPTS = [[5, 6, 7, i] for i in range(N_REQUESTS)]


class Load:
    """Hundreds of requests at once: more than the workers take, so that some wait."""

    def __init__(self, client: RolloutClient) -> None:
        sampling = fake_sampling(N_TOKENS)
        self._streams = [
            Streamed(client, prompt, sampling, deadline_s=2 * DEADLINE_S)
            for prompt in PROMPTS[:N_STREAMS]
        ]
        self._batch = asyncio.create_task(
            client.generate_batch(PROMPTS[N_STREAMS:], sampling, deadline_s=2 * DEADLINE_S)
        )

    async def is_held(self) -> None:
        """Wait until all streams, which were the first to get a slot, have `N_BEFORE` tokens."""
        for streamed in self._streams:
            await streamed.reached(N_BEFORE)

    def rids_at(self, worker: str) -> set[str]:
        """Streams that a worker is in the middle of."""
        return {streamed.rid for streamed in self._streams if streamed.worker == worker}

    async def rollouts(self) -> list[Rollout]:
        """One for each request, all of them checked."""
        async with asyncio.timeout(2 * DEADLINE_S):
            groups = await self._batch
        rollouts = [await each.rollout() for each in self._streams]
        for streamed, rollout in zip(self._streams, rollouts, strict=True):
            assert streamed.is_contiguous
            assert streamed.tokens == rollout.tokens.tolist()
        rollouts += [rollout for [rollout] in groups]
        for n, (prompt, rollout) in enumerate(zip(PROMPTS, rollouts, strict=True)):
            assert_fake_rollout(prompt, rollout, N_TOKENS, row=max(0, n - N_STREAMS))
        assert len({rollout.rid for rollout in rollouts}) == N_REQUESTS
        return rollouts


async def load_on(client: RolloutClient, victim: str) -> tuple[Load, set[str]]:
    """A load that is held, and which streams `victim` is in the middle of."""
    load = Load(client)
    await load.is_held()
    return load, load.rids_at(victim)


def assert_kept(rollouts: Sequence[Rollout], struck: set[str]) -> None:
    """What the victim was in the middle of went on, and every token was kept."""
    assert struck, "nothing ran on the victim: the test tested nothing"
    found = [rollout for rollout in rollouts if rollout.rid in struck]
    assert [rollout.n_resumed for rollout in found] == [N_BEFORE] * len(struck)
    assert all(rollout.n_attempts >= 2 for rollout in found)


async def serves(client: RolloutClient, worker: str, epoch: str) -> None:
    """Wait until a worker is back under a new lease, and idle; nothing of its past runs on."""

    def is_back(status: FleetStatus) -> bool:
        row = worker_in(status, worker)
        return row is not None and row.epoch != epoch and row.state == "ready"

    await status_when(client, is_back, START_S)
    await facts_when(client, lambda facts: worker in facts and not facts[worker].n_running)


async def epoch_of(client: RolloutClient, worker: str) -> str:
    row = worker_in(await client.status(), worker)
    assert row is not None
    return row.epoch


async def test_nothing_is_lost_or_sampled_twice_when_the_router_is_killed(
    token_limit: TokenLimit,
) -> None:
    options = {**ENGINES, "hold_file": str(token_limit.path)}
    async with (
        rolloutbus.up(
            workers=N_WORKERS, engine="fake", engine_options=options, store=False, lease=UNHURRIED
        ) as fleet,
        rolloutbus.connect(fleet.address, name="survivor") as client,
        EventReader.streams_of(client) as seen,
    ):
        before = (await client.status()).instance
        await seen.hears_everyone(client)
        with token_limit.at(N_BEFORE):
            load = Load(client)
            await load.is_held()
            fleet.kill_router()
        rollouts = await load.rollouts()

        assert {rollout.n_resumed for rollout in rollouts} == {0}
        await seen.until(lambda: all(seen.endings(r.rid) for r in rollouts))
        endings = {rollout.rid: seen.endings(rollout.rid) for rollout in rollouts}
        assert {rid: ended for rid, ended in endings.items() if ended != ["length"]} == {}
        status = await status_when(client, lambda status: len(status.workers) == N_WORKERS)
        assert status.instance != before
        assert status.router_epoch > 1
        assert_fake_rollout([1, 2], await client.generate([1, 2], fake_sampling(9)), 9)


async def test_rollouts_of_a_killed_worker_go_on_elsewhere(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    epoch = await epoch_of(client, "w0")
    n_resumed = client.connection.counters.resumed
    with token_limit.at(N_BEFORE):
        load, struck = await load_on(client, "w0")
        fleet.kill("w0")
    rollouts = await load.rollouts()

    assert_kept(rollouts, struck)
    assert client.connection.counters.resumed - n_resumed >= len(struck)
    await serves(client, "w0", epoch)


async def test_rollouts_of_a_killed_engine_host_go_on_and_its_worker_comes_back(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    epoch, pid = await epoch_of(client, "w1"), fleet.pids["w1"]
    with token_limit.at(N_BEFORE):
        load, struck = await load_on(client, "w1")
        fleet.kill_engine_host("w1")
    rollouts = await load.rollouts()

    assert_kept(rollouts, struck)
    await serves(client, "w1", epoch)
    assert fleet.pids["w1"] == pid, "the worker itself need not have died"


async def test_rollouts_of_a_frozen_engine_host_go_on_elsewhere_before_it_wakes_up(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    (host,) = fleet.host_pids("w1")
    with token_limit.at(N_BEFORE):
        load, struck = await load_on(client, "w1")
        os.kill(host, signal.SIGSTOP)
    try:
        rollouts = await load.rollouts()
    finally:
        os.kill(host, signal.SIGCONT)

    assert_kept(rollouts, struck)
    is_ready = partial(_has_state, name="w1", state="ready")
    await status_when(client, is_ready)
    await facts_when(client, lambda facts: "w1" in facts and not facts["w1"].n_running)
    assert fleet.host_pids("w1") == [host], "it need not have been started again"


def _has_state(status: FleetStatus, name: str, state: str) -> bool:
    row = worker_in(status, name)
    return row is not None and row.state == state


async def test_a_frozen_worker_that_wakes_up_changes_nothing(
    fleet: Fleet, client: RolloutClient, token_limit: TokenLimit
) -> None:
    epoch, pid = await epoch_of(client, "w2"), fleet.pids["w2"]
    with token_limit.at(N_BEFORE):
        load, struck = await load_on(client, "w2")
        os.kill(pid, signal.SIGSTOP)
    try:
        # Longer than its lease: the router has given it up and its work to others.
        await status_when(client, lambda status: worker_in(status, "w2") is None)
        rollouts = await load.rollouts()
    finally:
        os.kill(pid, signal.SIGCONT)

    assert_kept(rollouts, struck)
    await serves(client, "w2", epoch)
    assert fleet.pids["w2"] == pid, "it need not have been started again"
    again = await client.generate_batch(PROMPTS, fake_sampling(9), deadline_s=DEADLINE_S)
    for row, (prompt, [rollout]) in enumerate(zip(PROMPTS, again, strict=True)):
        assert_fake_rollout(prompt, rollout, 9, row=row)
        assert rollout.n_attempts == 1
