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
N_PROMPTS, N_ROLLOUTS, N_TOKENS = 8, 50, 160
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
        async with asyncio.timeout(60):
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
    load = Load(client, concurrency=N_ROLLOUTS)
    running = asyncio.create_task(load.run())

    await load.started()
    first = await publish(reference, publisher, in_flight)
    second = await publish(reference, publisher, in_flight)
    load.stop()
    rollouts = await running

    assert_true(reference, rollouts, by_runs=in_flight == "in_place")
    seen = {int(version) for _, rollout in rollouts for version in rollout.token_versions}
    assert len(rollouts) >= N_ROLLOUTS
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
