"""Weights stay on the GPU that trainer and worker share, or are copied to another one."""

import msgspec
import pytest
import torch

from rolloutbus.bus.weights.cuda_memory import CudaHandle, unpack_handle
from rolloutbus.bus.weights.manifest import total_bytes
from rolloutbus.bus.wire.messages.weights import Bucket, Offer
from rolloutbus.engine_worker.weights.torch_tensors import gpu_uuid
from rolloutbus.trainer_adapter.publisher.cuda_ipc import CudaIpcOffering
from tests.gpu.receiver_processes import Version, weight_receivers

BUCKET_BYTES = 5 << 20
FIRST_GPU = torch.device("cuda", 0)


def changed(offer: Offer, index: int, **fields: object) -> list[Offer]:
    """The offer with one bucket that is not true."""
    buckets = list(offer.buckets)
    buckets[index] = msgspec.structs.replace(buckets[index], **fields)
    return [msgspec.structs.replace(offer, buckets=buckets)]


def with_handle(bucket: Bucket, **fields: object) -> bytes:
    handle: CudaHandle = msgspec.structs.replace(unpack_handle(bucket.handle), **fields)
    return handle.pack()


async def test_a_worker_reads_every_byte_and_memory_is_used_again(seed: int) -> None:
    offering = CudaIpcOffering(BUCKET_BYTES)
    held: list[int] = []
    versions = [Version(number, seed) for number in (1, 2, 3)]
    async with weight_receivers("cuda_ipc", [gpu_uuid(FIRST_GPU)] * 2) as workers:
        for version in versions:
            offers = await offering.prepare(version.layout, version.tensors)
            assert len(offers[0].buckets) > 2
            for each in workers:
                got = await each.ask("take", manifest=version.manifest(offers))
                assert got == {"digests": version.digests, "moved_bytes": 0}
            for each in workers:
                assert await each.ask("release") == {"released": True}
            await offering.close()
            held.append(offering.held_bytes)
        assert held == [total_bytes(version.layout) for version in versions]
        offering.forget()
        assert offering.held_bytes == 0


async def test_memory_that_a_worker_has_open_keeps_its_content(seed: int) -> None:
    offering = CudaIpcOffering(BUCKET_BYTES)
    first, second, third = (Version(number, seed) for number in (1, 2, 3))
    async with weight_receivers("cuda_ipc", [gpu_uuid(FIRST_GPU)] * 2) as (slow, other):
        offers = await offering.prepare(first.layout, first.tensors)
        await slow.ask("take", manifest=first.manifest(offers))
        offers = await offering.prepare(second.layout, second.tensors)
        got = await other.ask("take", manifest=second.manifest(offers))
        assert got["digests"] == second.digests
        assert (await slow.ask("look"))["digests"] == first.digests
        await slow.kill()
        await other.ask("release")
        offers = await offering.prepare(third.layout, third.tensors)
        assert (await other.ask("take", manifest=third.manifest(offers)))["digests"] == (
            third.digests
        )
        await other.ask("release")
    offering.forget()
    assert offering.held_bytes == 0  # who died has nothing open any more


async def test_an_offer_that_cannot_be_opened_sends_the_worker_another_way(seed: int) -> None:
    offering = CudaIpcOffering(BUCKET_BYTES)
    version = Version(1, seed)
    async with weight_receivers("cuda_ipc", [gpu_uuid(FIRST_GPU)]) as (worker,):
        (offer,) = await offering.prepare(version.layout, version.tensors)
        bucket = offer.buckets[1]
        for offers in (
            changed(offer, 1, handle=b""),
            changed(offer, 1, handle=with_handle(bucket, memory=bytes(64))),
            changed(offer, 1, handle=with_handle(bucket, loan=0)),
            [msgspec.structs.replace(offer, host="another")],
        ):
            got = await worker.ask("take", manifest=version.manifest(offers))
            assert got["error"] == "CannotFetch", got
        # Nothing stayed open, and the GPU is as usable as before.
        got = await worker.ask("take", manifest=version.manifest([offer]))
        assert got["digests"] == version.digests
        await worker.ask("release")
    offering.forget()
    assert offering.held_bytes == 0


@pytest.mark.usefixtures("second_gpu")
@pytest.mark.parametrize("seen", ["second alone", "both"])
async def test_a_worker_on_another_gpu_copies_every_byte(
    seed: int, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seen == "both":
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    offering = CudaIpcOffering(BUCKET_BYTES)
    async with weight_receivers("cuda_ipc", [gpu_uuid(torch.device("cuda", 1))] * 2) as workers:
        places: list[list[object]] = []
        for number in (1, 2, 3):
            version = Version(number, seed)
            offers = await offering.prepare(version.layout, version.tensors)
            for each in workers:
                got = await each.ask("take", manifest=version.manifest(offers))
                assert got.get("digests") == version.digests, got
                assert got["moved_bytes"] == sum(each.size_bytes for each in offers[0].buckets)
            # It is a copy: the trainer's may change, and be freed.
            offering.forget()
            assert offering.held_bytes == 0
            places.append([(await each.ask("where"))["places"] for each in workers])
            for each in workers:
                assert (await each.ask("look"))["digests"] == version.digests
                await each.ask("release")
        assert places[0] == places[1] == places[2]  # memory is used again
        (offer,) = await offering.prepare(version.layout, version.tensors)
        false = changed(offer, 1, checksum=offer.buckets[1].checksum ^ 2**63)
        got = await workers[0].ask("take", manifest=version.manifest(false))
        assert got["error"] == "EngineFailed", got
        false = changed(offer, 1, handle=with_handle(offer.buckets[1], memory=bytes(64)))
        got = await workers[0].ask("take", manifest=version.manifest(false))
        assert got["error"] == "CannotFetch", got
        got = await workers[0].ask("take", manifest=version.manifest([offer]))
        assert got.get("digests") == version.digests, got
    offering.forget()


async def test_a_handle_to_less_memory_than_promised_is_refused(seed: int) -> None:
    offering = CudaIpcOffering(BUCKET_BYTES)
    version = Version(1, seed)
    async with weight_receivers("cuda_ipc", [gpu_uuid(FIRST_GPU)]) as (worker,):
        (offer,) = await offering.prepare(version.layout, version.tensors)
        smallest = min(offer.buckets, key=lambda each: each.size_bytes)
        largest = max(range(len(offer.buckets)), key=lambda i: offer.buckets[i].size_bytes)
        offers = changed(offer, largest, handle=smallest.handle)
        got = await worker.ask("take", manifest=version.manifest(offers))
    assert got["error"] == "CannotFetch", got
    assert "leads to" in got["text"]
    offering.forget()


async def test_wrong_bytes_are_found(seed: int) -> None:
    offering = CudaIpcOffering(BUCKET_BYTES)
    version = Version(1, seed)
    async with weight_receivers("cuda_ipc", [gpu_uuid(FIRST_GPU)]) as (worker,):
        (offer,) = await offering.prepare(version.layout, version.tensors)
        offers = changed(offer, 1, checksum=offer.buckets[1].checksum ^ 2**63)
        got = await worker.ask("take", manifest=version.manifest(offers))
    assert got["error"] == "EngineFailed", got
    assert str(offer.buckets[1].start) in got["text"]
    offering.forget()


async def test_a_trainer_that_forgot_its_copy_lends_nothing(seed: int) -> None:
    offering = CudaIpcOffering(BUCKET_BYTES)
    version = Version(1, seed)
    async with weight_receivers("cuda_ipc", [gpu_uuid(FIRST_GPU)]) as (worker,):
        offers = await offering.prepare(version.layout, version.tensors)
        offering.forget()
        got = await worker.ask("take", manifest=version.manifest(offers))
    assert got["error"] == "CannotFetch", got
