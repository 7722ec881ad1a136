"""Every logprob that comes over the bus is the one that its weights give, whatever happened."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from bus.messages.weights import InFlight
from rolloutbus import Rollout, RolloutClient, Sampling, WeightPublisher
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

TOLERANCE = 1e-4
N_PROMPTS, N_SAMPLES, N_TOKENS = 8, 5, 160
PROMPTS = [[3 + i, 10, 20 + i, 7] for i in range(N_PROMPTS)]
TEMPERATURE = 0.8
SAMPLING = Sampling(max_new_tokens=N_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
N_LONG = 600
"""Tokens of the rollouts that a kill must meet midway, however late their reader is."""
MIN_MIDWAY = 4
LONG = Sampling(max_new_tokens=N_LONG, temperature=TEMPERATURE, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model: Path) -> AsyncIterator[rolloutbus.Fleet]:
    options = {"threads": 1, "slots": 16}
    async with rolloutbus.up(
        model=str(tiny_model), workers=2, engine="transformers", engine_options=options
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: rolloutbus.Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address, name="truth") as connected:
        yield connected


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


class Batch:
    """Concurrent rollouts that can be watched while they run."""

    def __init__(self, client: RolloutClient, n_samples: int = N_SAMPLES) -> None:
        self._client = client
        self._n_samples = n_samples
        self._n_tokens = 0
        self._grown = asyncio.Event()

    async def run(self) -> list[tuple[list[int], Rollout]]:
        watcher = asyncio.create_task(self._watch())
        try:
            await self.reached(1)  # it must not queue behind those it stands for
            groups = await self._client.generate_batch(
                PROMPTS, SAMPLING, n=self._n_samples, deadline_s=120.0
            )
        finally:
            watcher.cancel()
        return [
            (prompt, rollout)
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for rollout in group
        ]

    async def _watch(self) -> None:
        stream = self._client.stream(PROMPTS[0], SAMPLING, deadline_s=120.0)
        async for delta in stream:
            self._n_tokens += len(delta.tokens)
            self._grown.set()

    async def reached(self, n_tokens: int) -> None:
        """Wait until a streamed sibling has so many tokens."""
        async with asyncio.timeout(60):
            while self._n_tokens < n_tokens:
                self._grown.clear()
                await self._grown.wait()


async def publish(reference: Reference, publisher: WeightPublisher, in_flight: InFlight) -> int:
    reference.perturb(seed=len(in_flight))
    published = await publisher.publish(
        reference.model.named_parameters(), in_flight=in_flight, require="all"
    )
    reference.keep(published.version)
    return published.version


def assert_true(
    reference: Reference, rollouts: list[tuple[list[int], Rollout]], *, by_runs: bool
) -> None:
    for prompt, rollout in rollouts:
        assert len(rollout.tokens) == len(rollout.logprobs) in {N_TOKENS, N_LONG}
        truth = (reference.by_runs if by_runs else reference.fresh)(prompt, rollout, TEMPERATURE)
        error = np.abs(truth - rollout.logprobs)
        assert np.nanmax(error) < TOLERANCE, (rollout.versions, int(np.nanargmax(error)))


@pytest.mark.parametrize("in_flight", ["in_place", "retract", "abort", "finish_old"])
async def test_logprobs_are_true_across_updates(
    client: RolloutClient, reference: Reference, in_flight: InFlight
) -> None:
    publisher = WeightPublisher(client)
    # More than the workers take at once: under `finish_old` only those that wait meet the update.
    batch = Batch(client, 2 * N_SAMPLES if in_flight == "finish_old" else N_SAMPLES)
    running = asyncio.create_task(batch.run())

    await batch.reached(N_TOKENS // 6)
    first = await publish(reference, publisher, in_flight)
    second = await publish(reference, publisher, in_flight)
    rollouts = await running

    assert_true(reference, rollouts, by_runs=in_flight == "in_place")
    seen = {int(version) for _, rollout in rollouts for version in rollout.token_versions}
    assert seen & {first, second}, "no rollout met an update: the test tested nothing"
    if in_flight == "finish_old":
        assert all(len(rollout.versions) == 1 for _, rollout in rollouts)
    else:
        assert any(len(rollout.versions) > 1 for _, rollout in rollouts)


class KillMidway:
    """Streams many rollouts and kills the first worker that is in the middle of several."""

    def __init__(self, fleet: rolloutbus.Fleet, client: RolloutClient) -> None:
        self._fleet = fleet
        self._client = client
        self._midway: dict[str, set[int]] = {}
        self.victim = ""

    async def run(self) -> list[tuple[list[int], Rollout]]:
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(self._stream(number, prompt))
                for number, prompt in enumerate(prompts)
            ]
        return list(zip(prompts, [stream.result() for stream in streams], strict=True))

    async def _stream(self, number: int, prompt: list[int]) -> Rollout:
        rollout = None
        async for delta in self._client.stream(prompt, LONG, deadline_s=120.0):
            midway = self._midway.setdefault(delta.worker, set())
            midway.add(number)
            if delta.start + len(delta.tokens) > N_LONG // 6:
                midway.discard(number)
            if not self.victim and len(midway) >= MIN_MIDWAY:
                self.victim = delta.worker
                self._fleet.kill(self.victim)
            rollout = delta.rollout
        assert rollout is not None
        return rollout


async def test_logprobs_are_true_after_a_worker_was_killed(
    fleet: rolloutbus.Fleet, client: RolloutClient, reference: Reference
) -> None:
    rollouts = await KillMidway(fleet, client).run()
    await fleet.wait_ready(60)

    assert_true(reference, rollouts, by_runs=False)
    assert sum(rollout.n_resumed > 0 for _, rollout in rollouts) >= MIN_MIDWAY
