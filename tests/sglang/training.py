"""A trainer of a tiny model on the real SGLang, load on its fleet, and the truth about both."""

import asyncio
from dataclasses import dataclass

import numpy as np

from rolloutbus import Rollout, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.weights import InFlight, TransportChoice
from rolloutbus.trainer_adapter.publisher.transfer import Published
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.models import VOCAB_SIZE

TOLERANCE = 1e-4
TEMPERATURE = 0.8
N_TOKENS = 120
PROMPTS = [[(3 + n) % VOCAB_SIZE for n in range(length)] for length in (4, 30, 500, 9, 300, 5)]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
SAMPLING = SamplingParams(max_new_tokens=N_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
MODES: tuple[InFlight, ...] = ("keep", "retract", "abort", "finish_old")


@dataclass
class Trainer:
    """A model in training, and the fleet that samples with its versions."""

    client: RolloutClient
    publisher: WeightPublisher
    reference: Reference
    seed: int = 0

    async def publish(
        self, in_flight: InFlight = "retract", transport: TransportChoice = "auto"
    ) -> Published:
        """A step of training, and its version everywhere."""
        self.seed += 1
        self.reference.perturb(self.seed)
        published = await self.publisher.publish(
            self.reference.model.named_parameters(),
            in_flight=in_flight,
            require="all",
            deadline_s=DEADLINE_S,
            transport=transport,
        )
        assert published.quarantined == {}
        self.reference.keep(published.version)
        return published


class Load:
    """Rollouts that never run dry: each one that ends is followed by the next, until `stop`."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._is_over = False
        self._begun = asyncio.Event()
        self._tasks = [asyncio.create_task(self._lane(prompt)) for prompt in PROMPTS]

    async def begun(self) -> None:
        """Wait until all of this is under way."""
        async with asyncio.timeout(DEADLINE_S):
            await self._begun.wait()

    async def stop(self) -> list[tuple[list[int], Rollout]]:
        """Let what runs end; all that ended."""
        self._is_over = True
        return [rollout for lane in await asyncio.gather(*self._tasks) for rollout in lane]

    async def _lane(self, prompt: list[int]) -> list[tuple[list[int], Rollout]]:
        finished: list[tuple[list[int], Rollout]] = []
        while not self._is_over:
            async for delta in self._client.stream(prompt, SAMPLING, deadline_s=DEADLINE_S):
                self._begun.set()
                if delta.rollout is not None:
                    finished.append((prompt, delta.rollout))
        return finished


def assert_true(
    reference: Reference, rollouts: list[tuple[list[int], Rollout]], *, by_runs: bool = False
) -> None:
    """Each logprob is what a forward pass with that version's weights gives."""
    for prompt, rollout in rollouts:
        truth = (reference.by_runs if by_runs else reference.fresh)(prompt, rollout, TEMPERATURE)
        error = np.abs(truth - rollout.logprobs)
        assert np.nanmax(error) < TOLERANCE, (rollout.version_runs, int(np.nanargmax(error)))


async def assert_greedy_is_true(trainer: Trainer, version: int) -> None:
    """New requests sample with this version, and with no KV of another."""
    for prompt in PROMPTS:
        rollout = await trainer.client.generate(prompt, GREEDY, deadline_s=DEADLINE_S)
        assert [run for run, _ in rollout.version_runs] == [version]
        assert rollout.tokens.tolist() == trainer.reference.likeliest(prompt, rollout)
        truth = trainer.reference.fresh(prompt, rollout, 1.0)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE
