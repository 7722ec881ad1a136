"""Pauses and aborts of the real SGLang, commanded by a client while streams are under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio

from rolloutbus import Fleet, Rollout, RolloutClient, SamplingParams
from rolloutbus.bus.wire.messages.control import PauseMode
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.types import FleetResult
from tests.integration.control_steps import (
    N_BEFORE,
    N_TOKENS,
    PROMPT,
    abort_stops_exactly_the_request_that_it_names,
    all_under_way,
)
from tests.integration.live_fleet import DEADLINE_S, Streamed, status_when
from tests.sglang.models import ENDLESS
from tests.sglang.reference import SameWeights

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPERATURE = 0.9
TOLERANCE = 1e-4


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def afterwards_it_serves(client: RolloutClient) -> AsyncIterator[None]:
    """A test that fails half way must not fail those after it."""
    yield
    await client.abort()
    await client.resume(check=False)


def sampling(n_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=n_tokens, temperature=TEMPERATURE, ignore_eos=True)


async def under_way(client: RolloutClient, n: int = 1) -> list[Streamed]:
    return await all_under_way([client] * n, sampling(ENDLESS))


def assert_true(reference: SameWeights, rollout: Rollout) -> None:
    truth = reference.fresh(PROMPT, rollout, TEMPERATURE)
    assert np.abs(truth - rollout.logprobs).max() < TOLERANCE


def assert_done(result: FleetResult) -> None:
    assert result.only(Done) == Done()


@pytest.mark.shows("pause_generation", "continue_generation", "resume_generation")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_stream_stands_still_and_goes_on_as_if_nothing_had_been(
    client: RolloutClient, reference: SameWeights, mode: PauseMode
) -> None:
    streams = await under_way(client, 4)

    assert_done(await client.pause(mode))
    for streamed in streams:
        assert await streamed.stands_still()
    assert_done(await client.resume())

    for streamed in streams:
        await streamed.grown_by(N_BEFORE)
        assert streamed.is_contiguous
        rollout = await streamed.cut()
        assert rollout.n_attempts == 1
        assert_true(reference, rollout)


async def test_a_pause_that_aborts_costs_a_client_nothing_but_time(
    client: RolloutClient, reference: SameWeights
) -> None:
    streams = await under_way(client, 4)

    assert_done(await client.pause("abort"))
    for streamed in streams:
        assert await streamed.stands_still()
    n_tokens = [len(streamed.tokens) for streamed in streams]
    assert_done(await client.resume())

    for streamed, n_before in zip(streams, n_tokens, strict=True):
        await streamed.grown_by(N_BEFORE)
        rollout = await streamed.cut()
        assert rollout.n_attempts == 2
        assert rollout.n_resumed >= n_before
        assert_true(reference, rollout)


async def test_a_drain_waits_for_what_runs_and_holds_what_is_new(client: RolloutClient) -> None:
    [running] = await under_way(client)

    pause = asyncio.create_task(client.pause("drain"))
    await status_when(client, lambda status: status.workers[0].state == "paused")
    waiting = Streamed(client, PROMPT, sampling(N_TOKENS))
    await running.grown_by(N_BEFORE)
    assert not pause.done()
    await running.cut()

    assert_done(await pause)
    assert waiting.tokens == []
    assert_done(await client.resume())
    assert len((await waiting.rollout()).tokens) == N_TOKENS


async def test_a_second_pause_or_resume_changes_nothing(client: RolloutClient) -> None:
    [streamed] = await under_way(client)
    for _ in range(2):
        assert_done(await client.pause("in_place"))
    assert await streamed.stands_still()
    for _ in range(2):
        assert_done(await client.resume())
    await streamed.grown_by(N_BEFORE)
    await streamed.cut()


async def test_one_kind_of_pause_can_follow_another(
    client: RolloutClient, reference: SameWeights
) -> None:
    modes: list[PauseMode] = ["in_place", "retract", "in_place", "abort"]
    streams = await under_way(client, 2)
    for mode in modes:
        assert_done(await client.pause(mode))
    assert_done(await client.resume())
    for streamed in streams:
        await streamed.grown_by(N_BEFORE)
        assert_true(reference, await streamed.cut())


async def test_abort_stops_exactly_the_request_that_it_names(fleet: Fleet) -> None:
    await abort_stops_exactly_the_request_that_it_names(fleet.address, sampling)


@pytest.mark.shows("abort_generation")
async def test_an_aborted_request_returns_what_was_sampled_and_spares_the_others(
    client: RolloutClient, reference: SameWeights
) -> None:
    streams = await under_way(client, 12)

    assert await client.abort([streams[1].rid]) == 1

    assert_true(reference, await streams[1].cancelled())
    for streamed in [streams[0], *streams[2:]]:
        await streamed.grown_by(N_BEFORE)
    assert await client.abort() == len(streams) - 1
    for streamed in [streams[0], *streams[2:]]:
        assert_true(reference, await streamed.cancelled())


async def test_a_request_that_waits_at_the_gate_can_be_aborted(client: RolloutClient) -> None:
    assert_done(await client.pause("in_place"))
    waiting = Streamed(client, PROMPT, sampling(N_TOKENS))
    await status_when(client, lambda status: status.n_running + status.n_queued > 0)

    assert await client.abort([waiting.rid]) == 1

    assert (await waiting.cancelled()).tokens.tolist() == []
    assert_done(await client.resume())
    rollout = await client.generate(PROMPT, sampling(8), deadline_s=DEADLINE_S)
    assert len(rollout.tokens) == 8


async def test_a_command_that_its_caller_gave_up_is_not_taken_for_the_next_one(
    client: RolloutClient,
) -> None:
    [running] = await under_way(client)
    for _ in range(2):
        drain = asyncio.create_task(client.pause("drain"))
        await status_when(client, lambda status: status.workers[0].state == "paused")
        drain.cancel()
        assert_done(await client.resume())
        assert_done(await client.pause("in_place"))
        assert await running.stands_still()
        assert_done(await client.resume())
        await running.grown_by(N_BEFORE)
    await running.cut()


async def test_a_stream_that_its_reader_left_ends_in_the_engine(client: RolloutClient) -> None:
    async with aclosing(client.stream(PROMPT, sampling(ENDLESS))) as deltas:
        async for delta in deltas:
            if delta.start >= N_BEFORE:
                break

    await status_when(client, lambda status: status.workers[0].n_running == 0)
