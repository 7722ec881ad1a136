"""Two fleets, one after the other at one address, and the clients of the first."""

import asyncio
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus.errors import OtherFleet
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    START_S,
    assert_fake_rollout,
    fake_sampling,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * START_S)]

PROMPT, N_TOKENS = [1, 2, 3], 4


async def test_clients_of_a_fleet_are_told_of_the_next_one_at_its_address(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/front"
    changes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    sampling = fake_sampling(N_TOKENS)
    async with rolloutbus.up(workers=1, engine="fake", address=address):
        client = await rolloutbus.connect(address).open()
        bound = await rolloutbus.connect(address, fleet=client.fleet).open()
        former = client.fleet
        client.on_other_fleet(changes.put_nowait)
        waiting = asyncio.create_task(bound.generate(PROMPT, sampling, versions="min:124"))
        session = await client.session("talk").open()
        session.append(PROMPT)
        await session.sample(sampling)
        assert_fake_rollout(PROMPT, await client.generate(PROMPT, sampling), N_TOKENS)
    async with rolloutbus.up(workers=1, engine="fake", address=address):
        async with asyncio.timeout(DEADLINE_S):
            change = await changes.get()
            assert change == client.other_fleet == (former, client.fleet)
            assert former != client.fleet
            with pytest.raises(OtherFleet, match="accept_fleet"):
                await client.generate(PROMPT, sampling, versions="min:124")
            with pytest.raises(OtherFleet, match="accept_fleet"):
                await session.sample(sampling)
            with pytest.raises(OtherFleet, match=f"not {former}"):
                await waiting
            assert_fake_rollout(PROMPT, await client.generate(PROMPT, sampling), N_TOKENS)
            client.accept_fleet()
            rule = "max-staleness:0"
            await client.generate(PROMPT, sampling, versions=rule)
            with pytest.raises(OtherFleet):
                await rolloutbus.connect(address, fleet=former).open()
        await bound.close()
        await client.close()


@pytest.mark.parametrize("has_store", [True, False])
async def test_a_fleet_without_a_store_goes_on_with_nothing_that_another_has_sampled(
    tmp_path: Path, *, has_store: bool
) -> None:
    address, slow = f"ipc://{tmp_path}/front", {"step_s": 0.01}
    first = rolloutbus.up(
        workers=1, engine="fake", engine_options=slow, address=address, store=has_store
    )
    async with first:
        client = await rolloutbus.connect(address).open()
        deltas = client.stream(PROMPT, fake_sampling(ENDLESS), deadline_s=2 * START_S)
        await anext(deltas)
    async with rolloutbus.up(workers=1, engine="fake", address=address, store=False):
        with pytest.raises(OtherFleet):
            async for _ in deltas:
                pass
        await client.close()
