"""A model that is split over two schedulers samples and is updated as if it were whole."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher
from tests.integration.live_fleet import Streamed
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.processes import scheduler_pids

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-4
RESTART_S = 400.0
PROMPTS = [[3 + i, 10, 20 + i, 7, 100 + i] for i in range(4)]
GREEDY = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
N_BEFORE = 20


@pytest.fixture(scope="module")
def cores() -> Iterator[None]:
    """SGLang wants to be told the core of each rank on a CPU."""
    usable = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{usable[0]}|{usable[-1]}")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(llama: Path, cores: None) -> AsyncIterator[Fleet]:
    del cores
    async with rolloutbus.up(**fleet_of(llama, tp_size=2)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address) as connected:
        yield connected


@pytest.mark.shows(
    "tensor parallel updates", "inference_engine_tensor_parallel_size", "tensor_parallel_size"
)
async def test_each_version_is_true_and_outlives_the_death_of_one_rank(
    fleet: Fleet, client: RolloutClient, llama: Path
) -> None:
    reference = Reference(llama)
    await assert_true(client, reference)

    reference.perturb(seed=1)
    published = await WeightPublisher(client).publish(
        reference.model.named_parameters(), require="all", deadline_s=DEADLINE_S
    )
    reference.keep(published.version)
    await assert_true(client, reference)

    streams = [Streamed(client, each, LONG, deadline_s=2 * RESTART_S) for each in PROMPTS]
    for streamed in streams:
        await streamed.reached(N_BEFORE)
    _, rank = scheduler_pids(fleet)
    os.kill(rank, signal.SIGKILL)
    for prompt, streamed in zip(PROMPTS, streams, strict=True):
        rollout = await streamed.rollout(RESTART_S)
        assert len(rollout.tokens) == LONG.max_new_tokens
        assert {int(version) for version in rollout.token_versions} == {published.version}
        assert rollout.tokens.tolist() == reference.likeliest(prompt, rollout)


async def assert_true(client: RolloutClient, reference: Reference) -> None:
    """Greedy tokens and their logprobs are those of a plain forward pass."""
    rollouts = await client.generate_batch(
        PROMPTS, GREEDY, versions="latest", deadline_s=DEADLINE_S
    )
    for prompt, [rollout] in zip(PROMPTS, rollouts, strict=True):
        assert rollout.tokens.tolist() == reference.likeliest(prompt, rollout)
        truth = reference.fresh(prompt, rollout, 1.0)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE
