"""Seeds on a GPU: the same tokens again, whatever shares the batch, and after a resume."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from rolloutbus import Rollout, RolloutClient, SamplingParams
from tests.gpu.gpu_fleets import DEADLINE_S, SLOTS, gpu_fleet, running
from tests.gpu.tiny import NEAR, error_of, load_tiny, save_tiny
from tests.integration.live_fleet import Streamed

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [5, 6, 7, 8, 9]
SEEDED = SamplingParams(max_new_tokens=128, temperature=1.0, ignore_eos=True, sampling_seed=7)
LONG = msgspec.structs.replace(SEEDED, max_new_tokens=1500)
N_BEFORE = 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(path: Path) -> AsyncIterator[RolloutClient]:
    async with running(gpu_fleet(path, enable_deterministic_inference=True)) as connected:
        yield connected


async def sample(client: RolloutClient, seed: int | None = 7) -> Rollout:
    sampling = msgspec.structs.replace(SEEDED, sampling_seed=seed)
    return await client.generate(PROMPT, sampling, deadline_s=DEADLINE_S)


@pytest.mark.shows("sampling_seed")
async def test_a_seed_gives_the_same_tokens_alone_and_in_a_full_batch(
    client: RolloutClient, path: Path
) -> None:
    alone = await sample(client)
    assert error_of(load_tiny(path), PROMPT, alone) < NEAR

    others = [asyncio.create_task(sample(client, seed)) for seed in range(100, 100 + SLOTS - 1)]
    crowded = await sample(client)

    assert crowded.tokens.tolist() == alone.tokens.tolist()
    assert np.array_equal(crowded.logprobs, alone.logprobs), "bit by bit"
    seen = {tuple(each.tokens.tolist()) for each in await asyncio.gather(*others)}
    assert len(seen) == SLOTS - 1


async def test_requests_without_a_seed_differ(client: RolloutClient) -> None:
    rollouts = await asyncio.gather(*(sample(client, None) for _ in range(8)))
    assert len({tuple(each.tokens.tolist()) for each in rollouts}) == len(rollouts)


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_a_seeded_request_goes_on_with_the_same_tokens_after_its_cache_was_lost(
    client: RolloutClient,
    mode: str,
) -> None:
    whole = await client.generate(PROMPT, LONG, deadline_s=DEADLINE_S)
    streamed = Streamed(client, PROMPT, LONG, deadline_s=DEADLINE_S)
    await streamed.reached(N_BEFORE)
    await client.pause(mode)  # pyright: ignore[reportArgumentType] - one of its words
    assert len(streamed.tokens) < len(whole.tokens), "it was under way"
    await client.resume()
    again = await streamed.rollout(DEADLINE_S)
    assert again.tokens.tolist() == whole.tokens.tolist()
