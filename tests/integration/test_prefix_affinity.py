"""Requests with a common beginning go where it is cached, on real engines that tell of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rolloutbus import RolloutClient, WeightPublisher
from rolloutbus.launcher.settings import UpOptions
from tests.integration.conftest import MAX_CONTEXT, SLOTS, VOCAB_SIZE
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

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine_options": {
        "threads": 1,
        "slots": SLOTS,
        "kv_tokens": SLOTS * MAX_CONTEXT,
        "report_prefixes": True,
    },
}
N_FAMILIES, N_SHARED = 4, 320
FAMILIES = [random_tokens(N_SHARED, seed, VOCAB_SIZE) for seed in range(N_FAMILIES)]
N_MARKS = n_marks_of(FAMILIES)


@pytest_asyncio.fixture(loop_scope="module")
async def marking(client: RolloutClient) -> AsyncIterator[RolloutClient]:
    async with marking_client(client, FAMILIES) as connected:
        yield connected


async def test_requests_with_a_common_beginning_go_where_it_is_cached(
    marking: RolloutClient,
) -> None:
    await common_beginnings_go_where_they_are_cached(marking, FAMILIES, VOCAB_SIZE)


async def test_a_flushed_cache_draws_nobody(client: RolloutClient, marking: RolloutClient) -> None:
    await client.flush_cache()
    await marks_are(client, 0)
    before = (await client.status()).counters.get("prefix_affinity", 0)

    rollouts = [await ask(marking, family) for family in FAMILIES]

    assert [n_cached(each) for each in rollouts] == [0] * N_FAMILIES
    assert (await client.status()).counters.get("prefix_affinity", 0) == before
    await marks_are(client, N_MARKS)  # or the next flush could be told before what it flushed


async def test_new_weights_draw_nobody_to_kv_of_the_old_ones(
    client: RolloutClient, marking: RolloutClient, tiny_model: Path
) -> None:
    reference = Reference(tiny_model)
    await WeightPublisher(client).publish(reference.model.named_parameters(), require="all")
    await marks_are(client, 0)

    homes = [await ask(marking, family) for family in FAMILIES]
    assert [n_cached(each) for each in homes] == [0] * N_FAMILIES
    await marks_are(client, N_MARKS)

    again = [await ask(marking, family) for family in FAMILIES]
    assert [each.worker for each in again] == [each.worker for each in homes]
    assert min(n_cached(each) for each in again) >= N_SHARED - 16
