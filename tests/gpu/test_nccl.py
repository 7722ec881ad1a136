"""The trainer broadcasts from its GPU to a worker on another one."""

import asyncio

import pytest
import torch

from rolloutbus.engine_worker.weights.torch_tensors import gpu_uuid
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from tests.gpu.receiver_processes import Version, weight_receivers
from tests.line_process import DEADLINE_S

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

BUCKET_BYTES = 5 << 20
SHORT_S = 15.0


def other_gpu() -> str:
    return gpu_uuid(torch.device("cuda", 1))


async def test_a_worker_gets_every_byte_version_after_version(seed: int) -> None:
    offering = CollectiveOffering("nccl", bucket_bytes=BUCKET_BYTES)
    async with weight_receivers("collective", [other_gpu()]) as (worker,):
        for number in (1, 2, 3):
            version = Version(number, seed)
            offers = await offering.prepare(version.layout, version.tensors)
            worker.tell("take", manifest=version.manifest(offers), rank=1, world=2)
            async with asyncio.timeout(DEADLINE_S):
                await offering.serve()
            await offering.close()
            got = await worker.hear()
            assert got.get("digests") == version.digests, got
            assert offering.problem == ""
            await worker.ask("release")


async def test_a_worker_that_dies_half_way_costs_nobody_else_its_life(seed: int) -> None:
    offering = CollectiveOffering("nccl", bucket_bytes=BUCKET_BYTES, timeout_s=SHORT_S)
    async with weight_receivers("collective", [other_gpu()] * 2) as (doomed, heir):
        first, second = Version(1, seed), Version(2, seed)
        offers = await offering.prepare(first.layout, first.tensors)
        doomed.tell("half", manifest=first.manifest(offers), rank=1, world=2)
        serving = asyncio.create_task(offering.serve())
        assert await doomed.hear() == {"half": True}
        await doomed.kill()
        async with asyncio.timeout(DEADLINE_S):
            await serving
        await offering.close()
        assert offering.problem
        offers = await offering.prepare(second.layout, second.tensors)
        heir.tell("take", manifest=second.manifest(offers), rank=1, world=2)
        async with asyncio.timeout(DEADLINE_S):
            await offering.serve()
        await offering.close()
        assert (await heir.hear()).get("digests") == second.digests


async def test_a_worker_on_the_trainers_gpu_is_told_to_take_another_way(seed: int) -> None:
    offering = CollectiveOffering("nccl", bucket_bytes=BUCKET_BYTES)
    version = Version(1, seed)
    own = gpu_uuid(torch.device("cuda", 0))
    async with weight_receivers("collective", [own]) as (worker,):
        offers = await offering.prepare(version.layout, version.tensors)
        worker.tell("take", manifest=version.manifest(offers), rank=1, world=2)
        async with asyncio.timeout(DEADLINE_S):
            await offering.serve()
        await offering.close()
        got = await worker.hear()
    assert got["error"] == "CannotFetch"
    assert own in got["text"]
