"""A request that aborts engines is found; one whose engines are killed is not accused."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.errors import EngineFailed
from tests.integration.live_fleet import (
    ENDLESS,
    PATIENT,
    START_S,
    STEADY_HOST,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(5 * START_S)]

POISON = 66
N_INNOCENT = 12
N_TOKENS = 50
PATIENCE_S = 3 * START_S
"""Several engines die and start again on the way."""
N_KILLS = 5
"""More deaths than a poisonous request is allowed."""


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    options = {"slots": 16, "step_s": 0.005, "poison_token": POISON}
    async with rolloutbus.up(
        workers=2,
        engine="fake",
        engine_options=options,
        store=False,
        lease=PATIENT,
        host=STEADY_HOST,
    ) as running:
        yield running


@pytest_asyncio.fixture
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address, name="poison") as connected:
        yield connected


async def test_a_request_goes_on_however_often_its_engine_is_killed(
    fleet: Fleet, client: RolloutClient
) -> None:
    counters = client.connection.counters
    streamed = Streamed(client, [5, 6], fake_sampling(ENDLESS), deadline_s=PATIENCE_S)
    for n_lost in range(N_KILLS):
        await streamed.grown_by(1)
        fleet.kill_engine_host(streamed.worker)
        await streamed.seen(lambda n_lost=n_lost: counters.lost > n_lost)
    await streamed.grown_by(1)
    await streamed.cut()
    found = (await client.status()).counters
    assert found["isolated"] == found["poisoned"] == 0


async def test_a_request_that_aborts_engines_is_given_up_and_its_neighbours_finish(
    client: RolloutClient,
) -> None:
    sampling = fake_sampling(N_TOKENS)
    prompts = [[5, 6, 7, number] for number in range(N_INNOCENT)]
    innocents = asyncio.gather(
        *(client.generate(prompt, sampling, deadline_s=PATIENCE_S) for prompt in prompts)
    )
    with pytest.raises(EngineFailed) as caught:
        await client.generate([POISON, 1], sampling, deadline_s=PATIENCE_S)
    assert caught.value.code == "poison"
    for prompt, rollout in zip(prompts, await innocents, strict=True):
        assert_fake_rollout(prompt, rollout, N_TOKENS)
    assert (await client.status()).counters["poisoned"] == 1
