"""Tensors on a GPU are copied as they were when their publication began."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import checksum, digest_of
from rolloutbus.bus.wire.messages.weights import Manifest, PullManifest
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from rolloutbus.trainer_adapter.publisher.tensor_source import HeldTensors
from rolloutbus.trainer_adapter.publisher.weight_writer import PINNED_BYTES, put
from tests.integration.store_harness import store_harness
from tests.line_process import DEADLINE_S

N = 3 * PINNED_BYTES // 4 + 13
"""float32 elements: more than two buffers full, and an odd rest."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_gpu_tensor_arrives_cast_and_digested(
    dtype: torch.dtype, is_turned: bool, seed: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    tensor = torch.randn(N, generator=generator, device="cuda")
    if is_turned:
        tensor = tensor[: N // 7 * 7].view(-1, 7).t()
    place = np.zeros(tensor.numel() * dtype.itemsize, np.uint8)
    judged = put(place, dtype, tensor)
    wanted = tensor.to(dtype).cpu().contiguous().view(-1).view(torch.uint8).numpy()
    assert np.array_equal(place, wanted)
    assert judged.digest == digest_of(wanted)
    assert judged.is_finite


def test_what_is_not_finite_is_found_on_the_way() -> None:
    tensor = torch.zeros(N, device="cuda")
    tensor[-1] = float("inf")
    place = np.zeros(tensor.nbytes, np.uint8)
    assert not put(place, torch.float32, tensor).is_finite


def test_work_that_was_queued_before_is_waited_for() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.zeros(N, device="cuda")
        for _ in range(200):
            tensor += 1.0
        source = HeldTensors({"w": tensor})
    [[held]] = source.buckets()
    place = np.zeros(tensor.nbytes, np.uint8)
    put(place, torch.float32, held)
    assert np.array_equal(place.view(np.float32), np.full(N, 200.0, np.float32))


async def test_a_copy_for_workers_on_the_gpu_waits_for_what_was_queued_before(
    tmp_path: Path,
) -> None:
    n_steps = 2000
    side = torch.cuda.Stream()
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        with torch.cuda.stream(side):
            tensor = torch.zeros(N, device="cuda")
            for _ in range(n_steps):
                tensor += 1.0
            handle = publisher.start({"w": tensor}, transport="cuda_ipc", deadline_s=DEADLINE_S)
        published = await handle
        async with BulkLink(harness.bulk) as link:
            manifest = await link.ask("pull_manifest", PullManifest("default", published.version))
        publisher.forget()
    assert isinstance(manifest, Manifest)
    (offer,) = manifest.offers
    (bucket,) = offer.buckets
    assert bucket.checksum == checksum(np.full(N, n_steps, np.float32).view(np.uint8))
