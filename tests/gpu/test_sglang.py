"""The real SGLang on a GPU: overlapped steps, weights from a trainer's GPU, memory by tag."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import pytest_asyncio
import torch

import rolloutbus
from rolloutbus import Rollout, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.control import Memory, MemoryTag
from tests.gpu.permuting_model import PermutingModel, permutation
from tests.integration.live_fleet import Streamed

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 120.0
N_REQUESTS = 48
N_TOKENS = 400
GREEDY = SamplingParams(max_new_tokens=N_TOKENS, temperature=0.0, ignore_eos=True)
KV_TOKENS = 65_536
MIB = 1 << 20
ROUNDED_MIB = 64
"""Memory that others, and the driver itself, take and leave meanwhile."""
TRIES = 5


@dataclass
class Trainer:
    """A model in training, and the fleet that samples with its versions."""

    client: RolloutClient
    publisher: WeightPublisher
    model: PermutingModel
    seeds: dict[int, int]
    """Version -> seed of its permutation."""

    async def publish(self, in_flight: str, transport: str = "auto") -> rolloutbus.types.Published:
        """The weights of a new permutation, everywhere."""
        seed = len(self.seeds)
        self.model.become(seed)
        published = await self.publisher.publish(
            self.model.weights(),
            in_flight=in_flight,  # pyright: ignore[reportArgumentType]
            transport=transport,  # pyright: ignore[reportArgumentType]
            require="all",
            deadline_s=DEADLINE_S,
        )
        self.seeds[published.version] = seed
        return published

    def assert_labelled(self, prompt: Sequence[int], rollout: Rollout) -> None:
        """Each token is what the weights of its version make of the one before."""
        before = np.concatenate([[prompt[-1]], rollout.tokens[:-1]])
        for version in {int(each) for each in rollout.token_versions}:
            rows = rollout.token_versions == version
            expected = permutation(self.seeds[version])[before[rows]]
            assert np.array_equal(rollout.tokens[rows], expected), f"version {version}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    path = tmp_path_factory.mktemp("sglang")
    model = PermutingModel()
    options: dict[str, object] = {
        "dtype": "bfloat16",
        "slots": N_REQUESTS,
        "arguments": {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.4,
            "max_total_tokens": KV_TOKENS,
            "cuda_graph_max_bs_decode": N_REQUESTS,
            "disable_prefill_cuda_graph": True,
            "enable_memory_saver": True,
        },
    }
    up = rolloutbus.up(
        model=model.save(path / "model"), workers=1, engine="sglang", engine_options=options
    )
    async with up as fleet, rolloutbus.connect(fleet.address, name="trainer") as client:
        publisher = WeightPublisher(client)
        yield Trainer(client, publisher, model, {0: 0})
        publisher.forget()


@pytest.mark.shows("abort_all_requests")
@pytest.mark.parametrize("in_flight", ["keep", "retract", "abort", "finish_old"])
async def test_each_token_is_of_the_version_it_says_with_overlapped_steps(
    trainer: Trainer, in_flight: Literal["keep", "retract", "abort", "finish_old"]
) -> None:
    prompts = [[20 + n, 30 + n, 40 + n] for n in range(N_REQUESTS)]
    asked = [
        asyncio.create_task(trainer.client.generate(prompt, GREEDY, deadline_s=DEADLINE_S))
        for prompt in prompts
    ]
    versions: list[int] = []
    for _ in range(3):
        published = await trainer.publish(in_flight)
        print(in_flight, published.transport, published.stall_ms)
        versions.append(published.version)
    rollouts = await asyncio.gather(*asked)
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert len(rollout.tokens) == N_TOKENS
        trainer.assert_labelled(prompt, rollout)
    rollout = await trainer.client.generate([50, 60], GREEDY, versions="latest")
    trainer.assert_labelled([50, 60], rollout)
    assert {int(each) for each in rollout.token_versions} == {versions[-1]}


@pytest.mark.shows("update_named_weights", "CUDA IPC")
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp", "delta"])
async def test_weights_come_while_requests_run(trainer: Trainer, transport: str) -> None:
    # A delta needs a version in the store to be the difference to.
    before = await trainer.publish("retract", "shm")
    over = asyncio.Event()
    lanes = [
        asyncio.create_task(keep_asking(trainer.client, [25 + n, 35 + n], over))
        for n in range(N_REQUESTS - 1)
    ]
    first = Streamed(trainer.client, [50, 60], GREEDY, deadline_s=DEADLINE_S)
    await first.reached(10)

    published = await trainer.publish("keep", transport)
    print(transport, published.transport, published.stall_ms)
    assert set(published.transport.values()) == {transport}, published.why

    over.set()
    rollouts = [([50, 60], await first.rollout(DEADLINE_S))]
    rollouts += [each for lane in await asyncio.gather(*lanes) for each in lane]
    for prompt, rollout in rollouts:
        trainer.assert_labelled(prompt, rollout)
    seen = {int(version) for _, each in rollouts for version in each.token_versions}
    assert seen == {before.version, published.version}, "it came while they ran"
    rollout = await trainer.client.generate([50, 61], GREEDY, versions="latest")
    trainer.assert_labelled([50, 61], rollout)
    assert {int(each) for each in rollout.token_versions} == {published.version}


async def counted_mib(trainer: Trainer, tag: MemoryTag, step: Literal["freed", "taken"]) -> int:
    """What the driver counts of a tag when it is put to sleep, or woken: as much as is told.

    Whoever else uses the GPU is counted, too, so that not every try shows it.
    """
    for _ in range(TRIES):
        # What SGLang's allocator keeps for later is given back with the cache, and has no tag.
        await trainer.client.flush_cache()
        awake = used_mib()
        told = (await trainer.client.sleep([tag], deadline_s=DEADLINE_S)).only(Memory)
        asleep = used_mib()
        woken = (await trainer.client.wake_up([tag], deadline_s=DEADLINE_S)).only(Memory)
        counted = awake - asleep if step == "freed" else used_mib() - asleep
        told_mib = told.size_bytes[tag] / MIB
        print(tag, step, counted, "told", told_mib, woken.size_bytes)
        assert told.asleep == [tag]
        assert woken.asleep == []
        if abs(told_mib - counted) <= ROUNDED_MIB:
            return counted
    raise AssertionError(f"{tag}: the driver counts something else than is told, each time")


@pytest.mark.shows("MemoryTag.CUDA_GRAPH")
async def test_sleep_frees_what_captured_graphs_hold(trainer: Trainer) -> None:
    assert await counted_mib(trainer, "cuda_graph", "freed") > 0
    rollout = await trainer.client.generate([50, 63], GREEDY, versions="latest")
    trainer.assert_labelled([50, 63], rollout)


@pytest.mark.shows("sleep", "wake_up")
@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
async def test_sleep_gives_memory_back_to_the_driver(
    trainer: Trainer, tag: Literal["kv_cache", "weights"]
) -> None:
    taken = await counted_mib(trainer, tag, "taken")
    kv_bytes = KV_TOKENS * trainer.model.kv_bytes_per_token
    weight_bytes = sum(each.nbytes for each in trainer.model.weights().values())
    expected = (kv_bytes if tag == "kv_cache" else weight_bytes) / MIB
    assert 0.95 * expected < taken < 1.3 * expected + 64
    if tag == "weights":  # they were not kept
        await trainer.publish("abort")
    rollout = await trainer.client.generate([50, 62], GREEDY, versions="latest")
    trainer.assert_labelled([50, 62], rollout)


async def keep_asking(
    client: RolloutClient, prompt: list[int], over: asyncio.Event
) -> list[tuple[list[int], Rollout]]:
    """One rollout after another, until `over`; the last one begins before that."""
    rollouts: list[tuple[list[int], Rollout]] = []
    while not over.is_set():
        rollout = await client.generate(prompt, GREEDY, deadline_s=DEADLINE_S)
        rollouts.append((prompt, rollout))
    return rollouts


def used_mib() -> int:
    """Memory of the GPU that is in use, as the driver counts it: whoever shares it counts, too."""
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) // MIB
