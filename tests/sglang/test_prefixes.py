"""The real SGLang tells what it has cached, and requests come where their beginning is."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient, WeightPublisher
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.prefix_steps import (
    ask,
    common_beginnings_go_where_they_are_cached,
    marking_client,
    marks_are,
    n_marks_of,
    random_tokens,
)
from tests.integration.reference import Reference
from tests.integration.session_steps import n_cached
from tests.sglang.fleets import fleet_of
from tests.sglang.models import VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="module")

N_FAMILIES, N_SHARED = 3, 320
FAMILIES = [random_tokens(N_SHARED, seed, VOCAB_SIZE) for seed in range(N_FAMILIES)]
N_MARKS = n_marks_of(FAMILIES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(llama: Path) -> AsyncIterator[Fleet]:
    """Two workers that tell."""
    options = fleet_of(llama)
    options["workers"] = 2
    options["engine_options"] = {**options.get("engine_options", {}), "report_prefixes": True}
    async with rolloutbus.up(**options) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(two: Fleet) -> AsyncIterator[RolloutClient]:
    """A client that has warmed the caches."""
    settings = ClientSettings(name="first", router=two.address, overtime_s=DEADLINE_S)
    async with RolloutClient(settings) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def marking(first: RolloutClient) -> AsyncIterator[RolloutClient]:
    async with marking_client(first, FAMILIES) as connected:
        yield connected


@pytest.mark.shows("kv_events_config")
async def test_requests_with_a_common_beginning_go_where_it_is_cached(
    marking: RolloutClient,
) -> None:
    await common_beginnings_go_where_they_are_cached(marking, FAMILIES, VOCAB_SIZE)


async def test_kv_of_older_weights_is_told_as_gone(
    first: RolloutClient, marking: RolloutClient, llama: Path
) -> None:
    reference = Reference(llama)
    publisher = WeightPublisher(first)
    for _ in range(2):
        await publisher.publish(reference.model.named_parameters(), require="all")
        await marks_are(first, 0)

        before = [await ask(marking, family) for family in FAMILIES]
        assert [n_cached(each) for each in before] == [0] * N_FAMILIES
        await marks_are(first, N_MARKS)

        again = [await ask(marking, family) for family in FAMILIES]
        assert [each.worker for each in again] == [each.worker for each in before]
        assert min(n_cached(each) for each in again) >= N_SHARED - 16
