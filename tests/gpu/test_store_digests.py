"""Tensors of a GPU are digested by the store, and compared with the GPU's own checksums."""

# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

from pathlib import Path

import torch

from rolloutbus.bus.weights.manifest import digest_of
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from rolloutbus.trainer_adapter.publisher.weight_writer import (
    MIN_LEFT_BYTES,
    WeightWriter,
    is_on_gpu,
)
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.store_harness import store_harness


def model(seed: int) -> dict[str, torch.Tensor]:
    """Tensors that are left to the store, and some that are not."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    return {
        "bf16": normal(4096, 1024).bfloat16(),
        "f32": normal(1024, 1025),
        "large": normal(64, 1024, 1024).half(),
        "odd": torch.ones(MIN_LEFT_BYTES + 3, dtype=torch.uint8, device="cuda"),
        "shifted": normal(1 << 20).bfloat16()[1:],
        "small": normal(16),
        "strided": normal(1024, 2048).t(),
    }


async def test_the_store_has_the_bytes_of_the_gpu(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, writer=WeightWriter(may_leave_digest=is_on_gpu))
        for number in range(4):  # the store's memory is new, then used again and page-locked
            tensors = model(seed + number)
            wanted = {
                name: digest_of(each.cpu().contiguous().view(-1).view(torch.uint8).numpy())
                for name, each in tensors.items()
            }
            published = await publisher.publish(tensors, deadline_s=DEADLINE_S)
            assert await harness.digests_kept(published.version) == wanted
        assert harness.asked.count("digest_tensors") == 4


async def test_tensors_that_are_cast_on_the_way_are_digested_as_they_are_published(
    tmp_path: Path, seed: int
) -> None:
    tensors = {name: each for name, each in model(seed).items() if each.is_floating_point()}
    async with store_harness(tmp_path) as harness:
        writer = WeightWriter(may_leave_digest=is_on_gpu)
        publisher = WeightPublisher(harness, dtype=torch.bfloat16, writer=writer)
        published = await publisher.publish(tensors, deadline_s=DEADLINE_S)
        wanted = {
            name: digest_of(each.bfloat16().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            for name, each in tensors.items()
        }
        assert await harness.digests_kept(published.version) == wanted
