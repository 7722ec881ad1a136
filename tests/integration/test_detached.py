"""Detached rollouts outlive the process that asked for them, and a router or worker besides."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import Fleet, Rollout, RolloutClient
from rolloutbus.launcher.settings import UpOptions
from tests.integration.detached_client import N_TOKENS, NAME, PROMPTS
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    assert_fake_rollout,
    live_and_die,
    status_when,
)
from tests.integration.token_limit import TokenLimit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"engine": "fake", "workers": 2}
SCRIPT = Path(__file__).with_name("detached_client.py")
GROUPS = [f"prompt-{index}" for index in range(len(PROMPTS))]
HELD_AT = 5


@asynccontextmanager
async def next_life(fleet: Fleet) -> AsyncGenerator[tuple[RolloutClient, dict[str, str]]]:
    """A new process's client of that name, and the rids that it finds, by group."""
    async with rolloutbus.connect(fleet.address, name=NAME) as client:
        found = await client.reattach(deadline_s=DEADLINE_S)
        assert [each.group for each in found] == GROUPS
        yield client, {each.group: each.rid for each in found}


async def collected(client: RolloutClient, rids: dict[str, str]) -> list[Rollout]:
    """All results, each checked against what its prompt must give; nothing is left behind."""
    waiting = [client.collect(rids[group], deadline_s=DEADLINE_S) for group in GROUPS]
    rollouts = await asyncio.gather(*waiting)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        assert_fake_rollout(prompt, rollout, N_TOKENS)
    await status_when(client, lambda status: not status.n_running)
    assert await client.reattach(deadline_s=DEADLINE_S) == []
    return rollouts


async def test_next_process_collects_what_ran_and_what_ended(
    fleet: Fleet, token_limit: TokenLimit
) -> None:
    with token_limit.at(HELD_AT):
        await live_and_die(SCRIPT, fleet.address)
        async with next_life(fleet) as (client, rids):
            assert (await client.status()).n_running == len(rids)
    # That process left too, and everything ends while nobody is there.
    async with rolloutbus.connect(fleet.address, name="other") as other:
        await status_when(other, lambda status: not status.n_running)
    async with next_life(fleet) as (client, rids):
        await collected(client, rids)


async def test_next_process_goes_on_with_a_stream_from_its_first_token(
    fleet: Fleet, token_limit: TokenLimit
) -> None:
    with token_limit.at(HELD_AT):
        await live_and_die(SCRIPT, fleet.address)
        async with next_life(fleet) as (client, rids):
            stream = client.follow(rids[GROUPS[0]], deadline_s=DEADLINE_S)
            first = await anext(stream)
            assert first.start == 0
    async with next_life(fleet) as (client, rids):
        tokens: list[int] = []
        rollout = None
        async for delta in client.follow(rids[GROUPS[0]], deadline_s=DEADLINE_S):
            assert delta.start == len(tokens)
            tokens += delta.tokens.tolist()
            rollout = delta.rollout
        assert rollout is not None
        assert tokens == rollout.tokens.tolist()
        assert_fake_rollout(PROMPTS[0], rollout, N_TOKENS)
        for group in GROUPS[1:]:
            await client.collect(rids[group], deadline_s=DEADLINE_S)


async def test_a_router_restart_in_between_loses_none(
    fleet: Fleet, token_limit: TokenLimit
) -> None:
    with token_limit.at(HELD_AT):
        await live_and_die(SCRIPT, fleet.address)
        fleet.kill_router()
        await fleet.wait_ready(START_S)
        async with next_life(fleet) as (client, rids):
            states = {each.state for each in await client.reattach(deadline_s=DEADLINE_S)}
            assert states == {"running"}
    async with next_life(fleet) as (client, rids):
        await collected(client, rids)


async def test_lost_workers_are_replaced_by_the_router_itself(
    fleet: Fleet, token_limit: TokenLimit
) -> None:
    with token_limit.at(HELD_AT):
        await live_and_die(SCRIPT, fleet.address)
        for name in fleet.worker_names:
            fleet.kill(name)
        await fleet.wait_ready(START_S)
        async with rolloutbus.connect(fleet.address, name="other") as other:
            await status_when(
                other, lambda status: status.counters.get("detached_requeued", 0) >= len(PROMPTS)
            )
    async with next_life(fleet) as (client, rids):
        await collected(client, rids)


async def test_caller_that_stops_waiting_leaves_it_to_be_collected(
    fleet: Fleet, token_limit: TokenLimit
) -> None:
    prompt = [9, 9, 9]
    sampling = rolloutbus.SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True, sampling_seed=7)
    async with rolloutbus.connect(fleet.address, name="patient") as client:
        with token_limit.at(HELD_AT):
            stream = client.stream(prompt, sampling, detached=True, deadline_s=DEADLINE_S)
            await anext(stream)
            await stream.aclose()
        (left,) = await client.reattach(deadline_s=DEADLINE_S)
        rollout = await client.collect(left.rid, deadline_s=DEADLINE_S)
        assert_fake_rollout(prompt, rollout, N_TOKENS)
