"""A trainer broadcasts to workers in other processes, over gloo."""

# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

import asyncio
from contextlib import AbstractAsyncContextManager
from itertools import chain
from operator import le
from typing import Any

import msgspec
import pytest
import torch

from rolloutbus.bus.weights.manifest import digest_of, lay_out, total_bytes
from rolloutbus.bus.wire.messages.weights import Manifest, Offer
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from tests.integration.live_fleet import DEADLINE_S, PACE_S, n_held
from tests.line_process import LineProcess, line_processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BUCKET_BYTES = 1 << 20
SHORT_S = 5.0


class Version:
    """Random weights of several dtypes, 5 MiB, so that there are several buckets."""

    def __init__(self, number: int, seed: int) -> None:
        torch.manual_seed(seed + number)
        self.number = number
        self.tensors = [
            torch.randn(301, 1027),
            torch.randn(7, 33).bfloat16(),
            torch.randn(640, 1024).t(),
            torch.tensor(0.5, dtype=torch.float64),
            torch.randn(0, 4),
            torch.randn(257, 1031).bfloat16(),
        ]
        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}
        self.layout = lay_out(
            (f"t{i}", names[each.dtype], tuple(each.shape)) for i, each in enumerate(self.tensors)
        )
        raws = [each.contiguous().view(-1).view(torch.uint8).numpy() for each in self.tensors]
        self.digests = [digest_of(raw) for raw in raws]

    def manifest(self, offers: list[Offer]) -> str:
        tensors = [
            msgspec.structs.replace(each, digest=digest)
            for each, digest in zip(self.layout, self.digests, strict=True)
        ]
        size = total_bytes(self.layout)
        return msgspec.json.encode(
            Manifest("default", self.number, "", "", size, tensors, offers)
        ).decode()

    @property
    def expected(self) -> dict[str, int]:
        return {each.name: digest for each, digest in zip(self.layout, self.digests, strict=True)}


def ranks(n: int) -> AbstractAsyncContextManager[list[LineProcess]]:
    """Worker processes, ready; killed at the end."""
    return line_processes([["tests.integration.collective_rank"]] * n)


async def broadcast(
    offering: CollectiveOffering,
    version: Version,
    workers: list[LineProcess],
    world: int = 0,
    *,
    must_settle: bool = False,
) -> list[dict[str, Any]]:
    """What the workers say; `must_settle`: they hold no more than after the version before."""
    offers = await offering.prepare(version.layout, version.tensors)
    manifest = version.manifest(offers)
    for rank, each in enumerate(workers, 1):
        order = {"manifest": manifest, "rank": rank, "world": world or len(workers) + 1}
        each.tell("take", **order, must_settle=must_settle)
    async with asyncio.timeout(DEADLINE_S):
        await offering.serve()
    await offering.close()
    return [await each.hear() for each in workers]


@pytest.mark.parametrize("n_workers", [2, 3])
async def test_every_worker_gets_every_byte_version_after_version(
    n_workers: int, seed: int
) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    held: list[list[list[int]]] = []
    n_ours: list[int] = []
    async with ranks(n_workers) as workers:
        for number in (1, 2, 3):
            version = Version(number, seed)
            got = await broadcast(offering, version, workers, must_settle=True)
            assert offering.problem == ""
            assert [each["digests"] for each in got] == [version.expected] * n_workers
            assert {each["moved_bytes"] for each in got} == {total_bytes(version.layout)}
            held.append([each["held"] for each in got])
            n_ours.append(n_held("fd"))
        async with asyncio.timeout(DEADLINE_S):
            while n_held("fd") > n_ours[1]:  # noqa: ASYNC110
                await asyncio.sleep(PACE_S)  # what a thread has closed is listed a moment longer
    before, after = chain(*held[1]), chain(*held[2])
    assert all(map(le, after, before)), held


async def test_ranks_keep_their_links_from_version_to_version(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    async with ranks(2) as workers:
        got = [await broadcast(offering, Version(number, seed), workers) for number in (1, 2)]
        for before, after in zip(*got, strict=True):
            assert before["sockets"]
            assert set(before["sockets"]) <= set(after["sockets"])
        offering.forget()
        version = Version(3, seed)
        last = await broadcast(offering, version, workers)
    for before, after in zip(got[1], last, strict=True):
        assert after["digests"] == version.expected
        assert not set(before["sockets"]) & set(after["sockets"])


async def test_a_rank_that_left_or_came_or_changed_its_place_means_another_group(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    async with ranks(3) as (first, second, third):
        companies = [(first, second), (first,), (first, third), (third, first), (second, third)]
        for number, company in enumerate(companies, 1):
            version = Version(number, seed)
            got = await broadcast(offering, version, [*company])
            assert offering.problem == ""
            assert [each["digests"] for each in got] == [version.expected] * len(company)


async def test_workers_of_two_trainers_take_versions_of_both_in_turns(seed: int) -> None:
    offerings = [CollectiveOffering(bucket_bytes=BUCKET_BYTES) for _ in range(2)]
    async with ranks(2) as workers:
        for number in range(1, 5):
            version = Version(number, seed)
            got = await broadcast(offerings[number % 2], version, workers)
            assert [each["digests"] for each in got] == [version.expected] * 2


async def test_a_rank_that_dies_between_versions_is_replaced(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    async with ranks(3) as (doomed, other, heir):
        await broadcast(offering, Version(1, seed), [doomed, other])
        await doomed.kill()
        version = Version(2, seed)
        got = await broadcast(offering, version, [heir, other])
        assert offering.problem == ""
        assert [each["digests"] for each in got] == [version.expected] * 2


async def test_a_rank_that_is_killed_half_way_ends_it_for_all_and_the_next_one_works(
    seed: int,
) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    async with ranks(3) as workers:
        doomed, others = workers[0], workers[1:]
        first = Version(1, seed)
        manifest = first.manifest(await offering.prepare(first.layout, first.tensors))
        doomed.tell("half", manifest=manifest, rank=1, world=4)
        for rank, each in enumerate(others, 2):
            each.tell("take", manifest=manifest, rank=rank, world=4)
        serving = asyncio.create_task(offering.serve())
        assert await doomed.hear() == {"half": True}
        await doomed.kill()
        # Far from the timeout: a broken link is noticed at once.
        async with asyncio.timeout(DEADLINE_S / 2):
            got = [await each.hear() for each in others]
            await serving
        await offering.close()
        # Who had everything already keeps it.
        for each in got:
            assert each.get("error") == "CannotFetch" or each["digests"] == first.expected
        assert offering.problem
        second = Version(2, seed)
        got = await broadcast(offering, second, others)
        assert [each["digests"] for each in got] == [second.expected] * 2


async def test_a_rank_that_hangs_half_way_ends_it_within_the_timeout(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES, timeout_s=SHORT_S)
    async with ranks(2) as (hanging, other):
        version = Version(1, seed)
        manifest = version.manifest(await offering.prepare(version.layout, version.tensors))
        hanging.tell("half", manifest=manifest, rank=1, world=3)
        other.tell("take", manifest=manifest, rank=2, world=3)
        async with asyncio.timeout(DEADLINE_S):
            await offering.serve()
            await offering.close()
            await other.hear()
        assert offering.problem


async def test_a_rank_that_never_comes_sends_the_others_another_way(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES, timeout_s=SHORT_S)
    async with ranks(1) as workers:
        (got,) = await broadcast(offering, Version(1, seed), workers, world=3)
    assert got["error"] == "CannotFetch"
    assert "rank 2" in offering.problem


async def test_a_trainer_that_gives_up_releases_those_who_wait(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    version = Version(1, seed)
    async with ranks(1) as (worker,):
        manifest = version.manifest(await offering.prepare(version.layout, version.tensors))
        worker.tell("take", manifest=manifest, rank=1, world=2)
        await offering.close()
        got = await worker.hear()
        worker.tell("take", manifest=manifest, rank=1, world=2)
        late = await worker.hear()
    assert (got["error"], late["error"]) == ("CannotFetch", "CannotFetch")


async def test_two_workers_cannot_have_one_rank(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    version = Version(1, seed)
    async with ranks(2) as workers:
        manifest = version.manifest(await offering.prepare(version.layout, version.tensors))
        for each in workers:
            each.tell("take", manifest=manifest, rank=1, world=2)
        await offering.serve()
        await offering.close()
        got = [await each.hear() for each in workers]
    assert [each["digests"] for each in got if "digests" in each] == [version.expected]
    assert [each["error"] for each in got if "error" in each] == ["CannotFetch"]


async def test_bytes_that_are_not_those_of_the_manifest_are_refused(seed: int) -> None:
    offering = CollectiveOffering(bucket_bytes=BUCKET_BYTES)
    version = Version(1, seed)
    version.digests[3] ^= 1
    async with ranks(1) as workers:
        (got,) = await broadcast(offering, version, workers)
    assert got["error"] == "EngineFailed"
    assert "t3" in got["text"]
    assert "t3" in offering.problem
