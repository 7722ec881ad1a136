"""Every logprob that comes over the bus is the one that its weights give, whatever happened."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rolloutbus import Fleet, Rollout, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.weights import InFlight, UpdateMode
from rolloutbus.launcher.settings import UpOptions
from tests.integration.conftest import REAL_ENGINES
from tests.integration.live_fleet import DEADLINE_S, ENDLESS, START_S, STEADY_HOST, Streamed
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {**REAL_ENGINES, "host": STEADY_HOST}
TOLERANCE = 1e-4
N_PROMPTS, N_ROLLOUTS, N_TOKENS = 8, 50, 160
PROMPTS = [[3 + i, 10, 20 + i, 7] for i in range(N_PROMPTS)]
TEMPERATURE = 0.8
SAMPLING = SamplingParams(max_new_tokens=N_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
N_STREAMS, N_BEFORE = 16, 30
LONG = SamplingParams(max_new_tokens=ENDLESS, temperature=TEMPERATURE, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


class Load:
    """Rollouts that never run dry: each one that ends is followed by the next, until `stop`."""

    def __init__(self, client: RolloutClient, concurrency: int) -> None:
        self._client = client
        self._concurrency = concurrency
        self._stopped = False
        self._first_delta = asyncio.Event()

    async def run(self) -> list[tuple[list[int], Rollout]]:
        async with asyncio.TaskGroup() as tasks:
            lanes = [
                tasks.create_task(self._lane(PROMPTS[i % N_PROMPTS]))
                for i in range(self._concurrency)
            ]
        return [rollout for lane in lanes for rollout in lane.result()]

    async def started(self) -> None:
        """Wait until the engines are generating."""
        async with asyncio.timeout(DEADLINE_S):
            await self._first_delta.wait()

    def stop(self) -> None:
        self._stopped = True

    async def _lane(self, prompt: list[int]) -> list[tuple[list[int], Rollout]]:
        finished: list[tuple[list[int], Rollout]] = []
        while not self._stopped:
            async for delta in self._client.stream(prompt, SAMPLING, deadline_s=120.0):
                self._first_delta.set()
                if delta.rollout is not None:
                    finished.append((prompt, delta.rollout))
        return finished


async def publish(
    reference: Reference,
    publisher: WeightPublisher,
    in_flight: InFlight,
    mode: UpdateMode = "staged",
) -> int:
    reference.perturb(seed=len(in_flight))
    published = await publisher.publish(
        reference.model.named_parameters(), in_flight=in_flight, mode=mode, require="all"
    )
    assert published.quarantined == {}
    reference.keep(published.version)
    return published.version


def assert_true(
    reference: Reference, rollouts: list[tuple[list[int], Rollout]], *, by_runs: bool
) -> None:
    for prompt, rollout in rollouts:
        truth = (reference.by_runs if by_runs else reference.fresh)(prompt, rollout, TEMPERATURE)
        error = np.abs(truth - rollout.logprobs)
        assert np.nanmax(error) < TOLERANCE, (rollout.version_runs, int(np.nanargmax(error)))


@pytest.mark.shows(
    "response_logprobs", "weight_version", "update_named_weights", "abort_all_requests"
)
@pytest.mark.parametrize(
    ("in_flight", "mode"),
    [
        ("keep", "staged"),
        ("retract", "staged"),
        ("abort", "staged"),
        ("finish_old", "staged"),
        ("keep", "overwrite"),
        ("retract", "overwrite"),
    ],
)
async def test_logprobs_are_true_across_updates(
    client: RolloutClient, reference: Reference, in_flight: InFlight, mode: UpdateMode
) -> None:
    publisher = WeightPublisher(client)
    load = Load(client, concurrency=N_ROLLOUTS)
    running = asyncio.create_task(load.run())

    await load.started()
    first = await publish(reference, publisher, in_flight, mode)
    second = await publish(reference, publisher, in_flight, mode)
    load.stop()
    rollouts = await running

    assert_true(reference, rollouts, by_runs=in_flight == "keep")
    seen = {int(version) for _, rollout in rollouts for version in rollout.token_versions}
    assert len(rollouts) >= N_ROLLOUTS
    assert all(len(rollout.tokens) == N_TOKENS for _, rollout in rollouts)
    assert seen & {first, second}, "no rollout met an update: the test tested nothing"
    if in_flight == "finish_old":
        assert all(len(rollout.version_runs) == 1 for _, rollout in rollouts)
    else:
        assert any(len(rollout.version_runs) > 1 for _, rollout in rollouts)


async def moved_from(streamed: Streamed, victim: str) -> None:
    await streamed.seen(lambda: streamed.worker != victim)
    await streamed.grown_by(N_BEFORE)


@pytest.mark.shows("death of an engine")
async def test_logprobs_are_true_after_a_worker_was_killed(
    fleet: Fleet, client: RolloutClient, reference: Reference
) -> None:
    prompts = [PROMPTS[i % N_PROMPTS] for i in range(N_STREAMS)]
    streams = [Streamed(client, prompt, LONG, deadline_s=START_S) for prompt in prompts]
    for streamed in streams:
        await streamed.reached(N_BEFORE)
    victim = streams[0].worker
    struck = [streamed for streamed in streams if streamed.worker == victim]
    fleet.kill(victim)
    for streamed in struck:
        await moved_from(streamed, victim)
    rollouts = [(prompt, await each.cut()) for prompt, each in zip(prompts, streams, strict=True)]

    assert_true(reference, rollouts, by_runs=False)
    n_resumed = {rollout.rid: rollout.n_resumed for _, rollout in rollouts}
    assert all(n_resumed[streamed.rid] >= N_BEFORE for streamed in struck)
