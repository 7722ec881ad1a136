"""Deltas, files and restored versions: a real store process, and a worker's receiver here."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rolloutbus.bus.actor.ref import STORE
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import Bytes, bytes_of, digest_of, lay_out
from rolloutbus.bus.weights.shm import SHM_DIR, SegmentWriter
from rolloutbus.bus.weights.tensor_files import shard_name
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.weights import (
    Manifest,
    Prepared,
    PrepareUpdate,
    PullManifest,
    RecordCommit,
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SealVersion,
    Transport,
    VersionRestored,
)
from rolloutbus.engine_worker.engine import RawTensor, TensorRange, TensorSpec
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host
from rolloutbus.engine_worker.weights.staged import CannotFetch, Fetcher, Staged
from rolloutbus.engine_worker.weights.transports.delta import ChangedSince
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.store_harness import StoreHarness, store_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

Weights = dict[str, torch.Tensor]
READ_BYTES = 1_000_003
"""Less than a large tensor has, and no whole number of elements."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def weights(seed: int) -> Weights:
    """9.5 MiB, so three chunks."""
    chance = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn((1031, 513), generator=chance),
        "dense": torch.randn((2048, 1024), generator=chance),
        "norm": torch.randn((333,), generator=chance).bfloat16(),
    }


def after_a_step(old: Weights, seed: int) -> Weights:
    """Some elements of one tensor, one of another."""
    chance = torch.Generator().manual_seed(seed)
    new = {name: each.clone() for name, each in old.items()}
    chosen = torch.randint(new["dense"].numel(), (2000,), generator=chance)
    new["dense"].view(-1)[chosen] += 1e-3
    new["norm"][7] += 1
    return new


def raw(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: digest_of(raw(each)) for name, each in tensors.items()}


def digests_staged(staged: Mapping[str, RawTensor]) -> dict[str, int]:
    return {name: digest_of(np.asarray(each)) for name, each in staged.items()}


class HeldWeights:
    """An engine that can be read; implements `WeightSource`."""

    def __init__(self, version: int, tensors: Weights) -> None:
        self._version = version
        self._tensors = tensors

    def read_ranges(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        assert sum(each.size_bytes for each in ranges) <= READ_BYTES
        return self._version, [
            raw(self._tensors[name])[offset : offset + size_bytes].copy()
            for name, offset, size_bytes in ranges
        ]


class Worker:
    """A receiver of one engine's weights."""

    def __init__(
        self, harness: StoreHarness, version: int, tensors: Weights, root: str = ""
    ) -> None:
        specs = [
            TensorSpec(name, DTYPES[each.dtype], tuple(each.shape), each.nbytes)
            for name, each in tensors.items()
        ]
        changes = ChangedSince(HeldWeights(version, tensors), SpareBuffer(), READ_BYTES)
        self._harness = harness
        self._receiver = WeightReceiver(specs, {**ways_of_this_host(root=root), "delta": changes})

    async def take(
        self, version: int, transport: Transport, sources: Sequence[str] = ()
    ) -> tuple[Prepared, dict[str, int]]:
        """What it says, and the digests of what it has."""
        bulk = self._harness.bulk
        ask = PrepareUpdate("default", version, bulk, transport, list(sources))
        prepared = await self._receiver.prepare(ask, timeout_s=DEADLINE_S)
        staged = digests_staged(self._receiver.staged(version))
        self._receiver.close()
        return prepared, staged


class Elsewhere(Fetcher):
    """A way that has memory of a GPU from versions before."""

    def __init__(self) -> None:
        self.n_given_back = 0

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        raise CannotFetch(f"not version {manifest.version} of {ask.policy} by {store}")

    def give_back_spares(self) -> None:
        self.n_given_back += 1


async def test_a_version_that_comes_another_way_has_memory_of_the_gpu_given_back(
    tmp_path: Path, seed: int
) -> None:
    elsewhere = Elsewhere()
    async with store_harness(tmp_path) as harness:
        version = await publish(harness, weights(seed))
        ask = PrepareUpdate("default", version, harness.bulk, "cuda_ipc")
        specs = [
            TensorSpec(name, DTYPES[each.dtype], tuple(each.shape), each.nbytes)
            for name, each in weights(seed).items()
        ]
        receiver = WeightReceiver(specs, {**ways_of_this_host(), "cuda_ipc": elsewhere})
        prepared = await receiver.prepare(ask, timeout_s=DEADLINE_S)
        receiver.close()
    assert prepared.transport == "shm"
    assert elsewhere.n_given_back == 1


async def publish(harness: StoreHarness, tensors: Weights) -> int:
    """Reserve, write, seal and commit; returns the version."""
    store = harness.ref(STORE)
    layout = lay_out(
        (name, DTYPES[each.dtype], tuple(each.shape)) for name, each in tensors.items()
    )
    reserve = ReserveVersion("default", layout)
    result = await store.ask_for(FleetResult, reserve, deadline_s=DEADLINE_S)
    reserved = result.only(Reserved)
    content = SegmentWriter().content(reserved.segment, reserved.size_bytes)
    for place in layout:
        bytes_of(content, place)[:] = raw(tensors[place.name])
    digests = [digest_of(bytes_of(content, each)) for each in layout]
    await store.ask(SealVersion("default", reserved.version, digests), deadline_s=DEADLINE_S)
    await store.ask(RecordCommit("default", reserved.version), deadline_s=DEADLINE_S)
    return reserved.version


async def restore(harness: StoreHarness, version: int) -> int:
    """Commits it, too, as the router does."""
    store = harness.ref(STORE)
    ask = RestoreVersion("default", version)
    result = await store.ask_for(FleetResult, ask, deadline_s=DEADLINE_S)
    restored = result.only(VersionRestored).version
    await store.ask(RecordCommit("default", restored), deadline_s=DEADLINE_S)
    return restored


async def test_a_sparse_step_moves_little_and_arrives_bit_exact(tmp_path: Path, seed: int) -> None:
    old = weights(seed)
    new = after_a_step(old, seed)
    async with store_harness(tmp_path) as harness:
        await publish(harness, old)
        version = await publish(harness, new)
        prepared, staged = await Worker(harness, 1, old).take(version, "delta")
    assert staged == digests_of(new)
    assert (prepared.transport, prepared.why) == ("delta", "")
    assert prepared.moved_bytes < prepared.size_bytes / 100


async def test_a_delta_of_several_chunks_arrives_bit_exact(tmp_path: Path, seed: int) -> None:
    old = weights(seed)
    new = {name: each * 1.001 for name, each in old.items()}
    async with store_harness(tmp_path) as harness:
        await publish(harness, old)
        version = await publish(harness, new)
        prepared, staged = await Worker(harness, 1, old).take(version, "delta")
    assert staged == digests_of(new)
    assert prepared.transport == "delta"
    assert 4 * 1024 * 1024 < prepared.moved_bytes < prepared.size_bytes


async def test_a_large_delta_is_left_where_others_pass_the_version_on(
    tmp_path: Path, seed: int
) -> None:
    old = weights(seed)
    new = {name: each * 1.001 for name, each in old.items()}
    async with store_harness(tmp_path) as harness:
        await publish(harness, old)
        version = await publish(harness, new)
        prepared, staged = await Worker(harness, 1, old).take(version, "delta", [harness.bulk])
    assert staged == digests_of(new)
    assert prepared.transport == "tcp"
    assert "which other workers pass on" in prepared.why


async def test_a_delta_may_span_several_versions(tmp_path: Path, seed: int) -> None:
    steps = [weights(seed)]
    async with store_harness(tmp_path, keep_committed=6) as harness:
        await publish(harness, steps[0])
        for n in range(5):
            steps.append(after_a_step(steps[-1], seed + n))
            await publish(harness, steps[-1])
        prepared, staged = await Worker(harness, 1, steps[0]).take(6, "delta")
    assert staged == digests_of(steps[-1])
    assert prepared.moved_bytes < prepared.size_bytes / 20


@pytest.mark.parametrize(
    ("base", "keep", "is_other_base", "is_new_model", "why"),
    [
        (0, 3, False, False, "started with"),
        (1, 1, False, False, "version_unavailable"),
        (1, 3, True, False, "did not come out"),
        (1, 3, False, True, "no_delta"),
    ],
    ids=["no base", "base not kept", "another base", "nothing in common"],
)
async def test_where_a_delta_is_of_no_use_the_whole_version_is_pulled(
    tmp_path: Path,
    *,
    base: int,
    keep: int,
    is_other_base: bool,
    is_new_model: bool,
    why: str,
) -> None:
    # Random bits: of floats even two strangers share their exponents.
    old = {"w": torch.randint(2**31, (300_000,), dtype=torch.int32).view(torch.float32)}
    new = {"w": old["w"].clone()}
    new["w"][5] = 1.0
    if is_new_model:
        new = {"w": torch.randint(2**31, (300_000,), dtype=torch.int32).view(torch.float32)}
    held = {"w": old["w"].flip(0)} if is_other_base else old
    async with store_harness(tmp_path, keep_committed=keep) as harness:
        await publish(harness, old)
        version = await publish(harness, new)
        prepared, staged = await Worker(harness, base, held).take(version, "delta")
    assert staged == digests_of(new)
    assert prepared.transport == "tcp"
    assert why in prepared.why


async def test_a_version_is_taken_from_files(tmp_path: Path, seed: int) -> None:
    new = weights(seed)
    disk = str(tmp_path / "disk")
    async with store_harness(tmp_path, disk=disk) as harness:
        version = await publish(harness, new)
        prepared, staged = await Worker(harness, 0, new, disk).take(version, "disk")
    assert staged == digests_of(new)
    assert (prepared.transport, prepared.why) == ("disk", "")


async def test_a_bit_flipped_in_a_file_is_found(tmp_path: Path, seed: int) -> None:
    new = weights(seed)
    disk = tmp_path / "disk"
    async with store_harness(tmp_path, disk=str(disk)) as harness:
        version = await publish(harness, new)
        await Worker(harness, 0, new, str(disk)).take(version, "disk")  # it is there now
        path = disk / "default" / str(version) / shard_name(1)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            (last,) = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 0x10]))
        with pytest.raises(EngineFailed) as caught:
            await Worker(harness, 0, new, str(disk)).take(version, "disk")
    assert (caught.value.code, caught.value.field) == ("digest_mismatch", "tensors.norm")


async def test_files_behind_a_link_are_not_read(tmp_path: Path, seed: int) -> None:
    new = weights(seed)
    disk = tmp_path / "disk"
    root = tmp_path / "root"
    root.mkdir()
    async with store_harness(tmp_path, disk=str(disk)) as harness:
        version = await publish(harness, new)
        (root / "default").symlink_to(disk / "default")
        prepared, staged = await Worker(harness, 0, new, str(root)).take(version, "disk")
    assert staged == digests_of(new)
    assert prepared.transport == "shm"
    assert prepared.why.startswith("disk: ")


async def test_without_files_the_version_is_mapped_on_the_stores_host(
    tmp_path: Path, seed: int
) -> None:
    new = weights(seed)
    async with store_harness(tmp_path) as harness:
        version = await publish(harness, new)
        prepared, staged = await Worker(harness, 0, new, str(tmp_path)).take(version, "disk")
    assert staged == digests_of(new)
    assert (prepared.transport, prepared.why) == ("shm", "disk: the version is not on disk")


async def test_without_files_and_shared_memory_the_version_is_pulled(
    tmp_path: Path, seed: int
) -> None:
    new = weights(seed)
    async with store_harness(tmp_path) as harness:
        version = await publish(harness, new)
        lose_shared_memory(tmp_path)  # as a worker in a container of its own sees it
        prepared, staged = await Worker(harness, 0, new, str(tmp_path)).take(version, "disk")
    assert staged == digests_of(new)
    assert prepared.transport == "tcp"
    assert prepared.why.startswith("disk: the version is not on disk; shm: ")


@pytest.mark.parametrize("is_crash", [True, False], ids=["crash", "stop"])
async def test_after_a_reboot_the_store_serves_the_last_version_from_disk(
    tmp_path: Path, seed: int, *, is_crash: bool
) -> None:
    new = weights(seed)
    disk = str(tmp_path / "disk")
    async with store_harness(tmp_path, disk=disk) as harness:
        version = await publish(harness, new)
        await Worker(harness, 0, new, disk).take(version, "disk")  # it is there now
        if is_crash:
            await harness.kill()
            lose_shared_memory(tmp_path)
        else:
            await harness.stop()
        await harness.start(disk=disk)
        assert harness.hello is not None
        assert harness.hello.store is not None
        assert harness.hello.store.committed == {"default": version}
        for transport in ("shm", "disk", "tcp"):
            prepared, staged = await Worker(harness, 0, new, disk).take(version, transport)
            assert staged == digests_of(new)
            assert prepared.transport == transport
        assert await publish(harness, after_a_step(new, seed)) == version + 1


def lose_shared_memory(run_dir: Path) -> None:
    """Of the store of this test: its name is in its ledger."""
    ledger = (run_dir / "store" / "versions.ledger").read_text(encoding="utf-8")
    for path in SHM_DIR.glob("rolloutbus-*"):
        owner = path.name.removesuffix(".lock").split("-")[1]
        if owner in ledger:
            path.unlink(missing_ok=True)  # a store that runs may have been faster


async def test_an_old_version_comes_back_under_a_new_number(tmp_path: Path, seed: int) -> None:
    old = weights(seed)
    new = after_a_step(old, seed)
    async with store_harness(tmp_path) as harness:
        await publish(harness, old)
        await publish(harness, new)
        assert await restore(harness, 1) == 3
        for transport in ("shm", "tcp"):
            _, staged = await Worker(harness, 2, new).take(3, transport)
            assert staged == digests_of(old)
        await harness.kill()
        await harness.start()
        prepared, staged = await Worker(harness, 2, new).take(3, "delta")
        assert staged == digests_of(old)
        assert prepared.transport == "delta"
        assert await publish(harness, new) == 4


async def test_a_bit_flipped_in_the_stores_base_costs_only_the_delta(
    tmp_path: Path, seed: int
) -> None:
    old = weights(seed)
    new = after_a_step(old, seed)
    async with store_harness(tmp_path) as harness:
        await publish(harness, old)
        version = await publish(harness, new)
        await flip(harness, 1, "dense")
        prepared, staged = await Worker(harness, 1, old).take(version, "delta")
    assert staged == digests_of(new)
    assert (prepared.transport, "'dense'" in prepared.why) == ("tcp", True)


async def test_a_bit_flipped_in_the_stores_new_version_is_found_behind_a_delta(
    tmp_path: Path, seed: int
) -> None:
    old = weights(seed)
    new = after_a_step(old, seed)
    async with store_harness(tmp_path) as harness:
        await publish(harness, old)
        version = await publish(harness, new)
        await flip(harness, version, "dense")
        with pytest.raises(EngineFailed) as caught:
            await Worker(harness, 1, old).take(version, "delta")
    assert (caught.value.code, caught.value.field) == ("digest_mismatch", "tensors.dense")


async def flip(harness: StoreHarness, version: int, name: str) -> None:
    """One bit of a sealed version in shared memory."""
    async with BulkLink(harness.bulk) as link:
        manifest = await link.ask("pull_manifest", PullManifest("default", version))
    assert isinstance(manifest, Manifest)
    (tensor,) = [each for each in manifest.tensors if each.name == name]
    SegmentWriter().content(manifest.segment, manifest.size_bytes)[tensor.offset + 5] ^= 4
