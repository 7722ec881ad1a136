"""The prefix cache behind the GPU's: in host memory and in files, found again and forgotten."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rolloutbus import Rollout, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.control import CacheTier, Flushed, Load
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.errors import BusError
from tests.gpu.gpu_fleets import DEADLINE_S, gpu_fleet, running
from tests.gpu.tiny import NEAR, error_of, load_tiny, save_tiny

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = 64
KV_TOKENS = 4096
N_PROMPT = 1024
N_OTHERS = 6
"""Prompts of this length that leave no room for another one on the GPU."""
SAMPLING = SamplingParams(max_new_tokens=16, temperature=1.0, ignore_eos=True)
UNCACHED = "total_prefill_uncached_tokens"
EVERYTHING: list[CacheTier] = ["device", "host", "storage"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where SGLang puts its files."""
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(path: Path, stored: Path) -> AsyncIterator[RolloutClient]:
    options = gpu_fleet(
        path,
        max_total_tokens=KV_TOKENS,
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_ratio=4.0,
        hicache_write_policy="write_through",
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(stored))
        async with running(options) as connected:
            yield connected


def prompt_of(number: int) -> list[int]:
    """No two share a beginning."""
    return [3 + number, *(3 + (number + 7 * i) % 500 for i in range(N_PROMPT - 1))]


async def ask(client: RolloutClient, number: int) -> tuple[Rollout, int]:
    """A rollout, and how many tokens of its prompt had to be computed."""
    before = (await client.get_load()).only(Load).gauges[UNCACHED]
    rollout = await client.generate(prompt_of(number), SAMPLING, deadline_s=DEADLINE_S)
    after = (await client.get_load()).only(Load).gauges[UNCACHED]
    return rollout, int(after - before)


async def forget(client: RolloutClient, tiers: list[CacheTier]) -> int:
    return (await client.flush_cache(tiers)).only(Flushed).n_tokens


def n_pages_in(stored: Path) -> int:
    """Files, each of one page of the cache."""
    return len([*stored.glob("*.bin")])


async def written(client: RolloutClient, stored: Path, n_pages: int) -> None:
    """Wait for files: they are written behind the requests, and only while some come."""
    async with asyncio.timeout(DEADLINE_S):
        while n_pages_in(stored) < n_pages:
            await client.generate([5, 6], SAMPLING, deadline_s=DEADLINE_S)


async def test_a_prompt_that_left_the_gpu_is_found_in_host_memory(
    client: RolloutClient, path: Path
) -> None:
    await forget(client, EVERYTHING)
    _, n_first = await ask(client, 0)
    for other in range(1, 1 + N_OTHERS):
        await ask(client, other)

    rollout, n_again = await ask(client, 0)

    print("computed", n_first, n_again)
    assert n_first >= N_PROMPT - PAGE
    assert n_again <= 2 * PAGE
    assert error_of(load_tiny(path), prompt_of(0), rollout) < NEAR


async def test_what_device_and_host_forgot_is_found_in_files(
    client: RolloutClient, path: Path, stored: Path
) -> None:
    await forget(client, EVERYTHING)
    assert n_pages_in(stored) == 0
    await ask(client, 20)
    await written(client, stored, N_PROMPT // PAGE)

    assert await forget(client, ["device", "host"]) > 0
    rollout, n_again = await ask(client, 20)

    print("computed", n_again)
    assert n_again <= 2 * PAGE
    assert error_of(load_tiny(path), prompt_of(20), rollout) < NEAR


@pytest.mark.shows("flush the CPU's tier", "flush the storage's tier", "clear_hicache_storage")
async def test_what_every_tier_forgot_is_computed_anew(client: RolloutClient, stored: Path) -> None:
    n_before = n_pages_in(stored)
    await ask(client, 30)
    await written(client, stored, n_before + N_PROMPT // PAGE)

    await forget(client, EVERYTHING)

    assert n_pages_in(stored) == 0
    _, n_again = await ask(client, 30)
    assert n_again >= N_PROMPT - PAGE


async def test_weights_are_not_replaced_where_a_storage_knows_no_versions(
    client: RolloutClient, path: Path
) -> None:
    if upstream.stores_by_namespace():
        pytest.skip("this SGLang's storage tells versions apart")
    weights = {name: each.bfloat16() for name, each in load_tiny(path).named_parameters()}
    with pytest.raises(BusError, match="hicache_storage_backend"):
        await WeightPublisher(client).publish(weights, require="all", deadline_s=DEADLINE_S)
