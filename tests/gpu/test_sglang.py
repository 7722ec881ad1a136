"""The real SGLang on a GPU: overlapped steps, weights from a trainer's GPU, memory by tag."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import pytest_asyncio
import torch

import rolloutbus
from rolloutbus import Rollout, RolloutClient, Sampling, WeightPublisher

pytest.importorskip("sglang")
from tests.gpu.permuting import PermutingModel, permutation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

DEADLINE_S = 120.0
N_REQUESTS = 48
N_TOKENS = 400
GREEDY = Sampling(max_new_tokens=N_TOKENS, temperature=0.0, ignore_eos=True)
KV_TOKENS = 65_536
MIB = 1 << 20


@dataclass
class Trainer:
    """A model in training, and the fleet that samples with its versions."""

    client: RolloutClient
    publisher: WeightPublisher
    model: PermutingModel
    seeds: dict[int, int]
    """Version -> seed of its permutation."""

    async def publish(self, in_flight: str, transport: str = "auto") -> rolloutbus.Published:
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


@pytest.mark.parametrize("in_flight", ["in_place", "retract", "abort", "finish_old"])
async def test_each_token_is_of_the_version_it_says_with_overlapped_steps(
    trainer: Trainer, in_flight: Literal["in_place", "retract", "abort", "finish_old"]
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


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
async def test_weights_come_from_the_trainers_gpu(trainer: Trainer, transport: str) -> None:
    published = await trainer.publish("retract", transport)
    assert set(published.transport.values()) == {transport}, published.why
    rollout = await trainer.client.generate([50, 61], GREEDY, versions="latest")
    trainer.assert_labelled([50, 61], rollout)
    assert {int(each) for each in rollout.token_versions} == {published.version}


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
async def test_sleep_gives_memory_back_to_the_driver(
    trainer: Trainer, tag: Literal["kv_cache", "weights"]
) -> None:
    (await trainer.client.sleep([tag], deadline_s=DEADLINE_S)).check()
    asleep = used_mib()
    (await trainer.client.wake_up([tag], deadline_s=DEADLINE_S)).check()
    taken = used_mib() - asleep
    kv_bytes = KV_TOKENS * trainer.model.kv_bytes_per_token
    weight_bytes = sum(each.nbytes for each in trainer.model.weights().values())
    expected = (kv_bytes if tag == "kv_cache" else weight_bytes) / MIB
    print(tag, taken, expected)
    assert 0.95 * expected < taken < 1.3 * expected + 64
    if tag == "weights":  # they were not kept
        await trainer.publish("abort")
    rollout = await trainer.client.generate([50, 62], GREEDY, versions="latest")
    trainer.assert_labelled([50, 62], rollout)


def used_mib() -> int:
    """Memory of the first GPU that is in use, as the driver counts it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
