"""What the real SGLang tells of its prefix cache on a GPU: pages of 16 tokens, overlapped steps."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rolloutbus import Rollout, RolloutClient, SamplingParams, Want, WeightPublisher
from tests.gpu.gpu_fleets import DEADLINE_S, Served, gpu_fleet, running
from tests.gpu.tiny import load_tiny, save_tiny
from tests.integration.prefix_steps import marks_are, n_marks_of, random_tokens
from tests.sglang.models import VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = random_tokens(640, 1, VOCAB_SIZE)
N_MARKS = n_marks_of([PROMPT])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    options = gpu_fleet(path)
    options["engine_options"] = {**options.get("engine_options", {}), "report_prefixes": True}
    async with running(options) as client:
        yield Served(client, load_tiny(path))


async def n_cached(client: RolloutClient) -> int:
    """Tokens of the prompt that a request for it finds."""
    want = Want(cached_tokens=True)
    rollout: Rollout = await client.generate(PROMPT, SAMPLING, want=want, deadline_s=DEADLINE_S)
    return int(rollout.arrays["cached_tokens"][0])


@pytest.mark.shows("kv_events_config")
async def test_what_is_cached_is_told_and_what_is_flushed_is_not(served: Served) -> None:
    client = served.client
    assert await n_cached(client) == 0
    await marks_are(client, N_MARKS)
    assert await n_cached(client) >= len(PROMPT) - 16

    await client.flush_cache()
    await marks_are(client, 0)


async def test_kv_of_older_weights_is_told_as_gone(served: Served) -> None:
    client, publisher = served.client, WeightPublisher(served.client)
    weights = {name: each.bfloat16() for name, each in served.model.named_parameters()}
    for _ in range(2):
        await n_cached(client)
        await marks_are(client, N_MARKS)
        await publisher.publish(weights, require="all")
        await marks_are(client, 0)
        assert await n_cached(client) == 0
