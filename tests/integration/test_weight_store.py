import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import digest_of
from rolloutbus.bus.weights.shm import SHM_DIR, SegmentWriter
from rolloutbus.bus.wire.errors import EngineFailed, Refused
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate, PullManifest, Transport
from rolloutbus.engine_worker.engine import TensorSpec
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from rolloutbus.trainer_adapter.publisher.tensor_source import DTYPE_NAMES, named_tensors
from rolloutbus.trainer_adapter.publisher.weight_writer import WeightWriter
from rolloutbus.trainer_adapter.store.segments import AHEAD_BYTES
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.store_harness import ROOT, StoreHarness, store_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


class TiedModel(torch.nn.Module):
    """Odd shapes, several dtypes, strides, a scalar, tied weights; 9.6 MiB, so three chunks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=generator))

        self.embed = weight(1031, 257)
        self.head = self.embed
        self.narrow = torch.nn.Parameter(weight(333, 7).detach().bfloat16())
        self.strided = torch.nn.Parameter(weight(1024, 2048).detach().t())
        self.scale = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))


def specs_of(model: torch.nn.Module) -> list[TensorSpec]:
    return [
        TensorSpec(name, DTYPE_NAMES[each.dtype], tuple(each.shape), each.nbytes)
        for name, each in named_tensors(model)
    ]


def digests_of(model: torch.nn.Module) -> dict[str, int]:
    return {
        name: digest_of(each.contiguous().view(-1).view(torch.uint8).numpy())
        for name, each in named_tensors(model)
    }


def digests_staged(staged: Mapping[str, RawTensor]) -> dict[str, int]:
    return {name: digest_of(np.asarray(each)) for name, each in staged.items()}


def prepare(harness: StoreHarness, version: int, transport: Transport = "shm") -> PrepareUpdate:
    return PrepareUpdate("default", version, harness.bulk, transport)


def receiver_of(model: torch.nn.Module) -> WeightReceiver:
    return WeightReceiver(specs_of(model), ways_of_this_host())


async def pull_elsewhere(
    harness: StoreHarness, version: int, specs: Sequence[TensorSpec], transport: str
) -> dict[str, object]:
    """What a receiver in another process got."""
    ask = json.dumps({"policy": "default", "version": version, "bulk": harness.bulk})
    rows = json.dumps([(each.name, each.dtype, each.shape, each.size_bytes) for each in specs])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.weight_puller",
        ask,
        rows,
        transport,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return json.loads(output)


@pytest.mark.parametrize("pull", ["shm", "tcp"])
@pytest.mark.parametrize("push", ["shm", "tcp"])
async def test_a_published_model_arrives_bit_exact(
    tmp_path: Path, seed: int, push: str, pull: str
) -> None:
    model = TiedModel(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, writer=WeightWriter(may_map=push == "shm"))
        published = await publisher.publish(model, deadline_s=DEADLINE_S)
        got = await pull_elsewhere(harness, published.version, specs_of(model), pull)
    assert got == {"transport": pull, "digests": digests_of(model)}
    assert "head" not in digests_of(model)


async def test_each_version_has_its_own_bytes_while_segments_are_reused(
    tmp_path: Path, seed: int
) -> None:
    async with store_harness(tmp_path, keep_committed=1) as harness:
        publisher = WeightPublisher(harness)
        receiver = receiver_of(TiedModel(seed))
        for step in range(8):
            model = TiedModel(seed + step)
            version = (await publisher.publish(model.state_dict(), deadline_s=DEADLINE_S)).version
            await receiver.prepare(prepare(harness, version), timeout_s=DEADLINE_S)
            staged = receiver.staged(version)
            assert digests_staged(staged) == digests_of(model)
            receiver.drop(version)
        receiver.close()


async def test_a_killed_store_comes_back_with_its_versions(tmp_path: Path, seed: int) -> None:
    model = TiedModel(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        await publisher.publish(model, deadline_s=DEADLINE_S)
        await harness.kill()
        await harness.start()
        assert harness.hello is not None
        assert harness.hello.store is not None
        assert harness.hello.store.committed == {"default": 1}
        got = await pull_elsewhere(harness, 1, specs_of(model), "shm")
        assert got["digests"] == digests_of(model)
        assert (await publisher.publish(model, deadline_s=DEADLINE_S)).version == 2


async def test_a_store_whose_segments_others_delete_goes_on_and_keeps_its_versions(
    tmp_path: Path, seed: int
) -> None:
    async with store_harness(tmp_path, keep_committed=1) as harness:
        publisher = WeightPublisher(harness)
        await publisher.publish(TiedModel(seed), deadline_s=DEADLINE_S)
        owner = (await segment_of(harness, 1)).split("-")[1]
        for version in (2, 3, 4):
            published = await publisher.publish(TiedModel(seed + version), deadline_s=DEADLINE_S)
            assert published.version == version
            for path in SHM_DIR.glob(f"rolloutbus-{owner}-*"):
                path.unlink(missing_ok=True)  # the store may have been faster
        last = TiedModel(seed + 4)
        got = await pull_elsewhere(harness, 4, specs_of(last), "tcp")
        assert got["digests"] == digests_of(last)


async def test_a_stopped_store_leaves_no_shared_memory_and_keeps_its_numbers(
    tmp_path: Path, seed: int
) -> None:
    model = TiedModel(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        await publisher.publish(model, deadline_s=DEADLINE_S)
        async with BulkLink(harness.bulk) as link:
            manifest = await link.ask("pull_manifest", PullManifest("default", 1))
        assert isinstance(manifest, Manifest)
        owner = manifest.segment.split("-")[1]
        assert list(SHM_DIR.glob(f"rolloutbus-{owner}*"))
        assert await harness.stop() == 0
        assert list(SHM_DIR.glob(f"rolloutbus-{owner}*")) == []
        await harness.start()
        assert (await publisher.publish(model, deadline_s=DEADLINE_S)).version == 2


async def segment_of(harness: StoreHarness, version: int) -> str:
    async with BulkLink(harness.bulk) as link:
        manifest = await link.ask("pull_manifest", PullManifest("default", version))
    assert isinstance(manifest, Manifest)
    return manifest.segment


@pytest.mark.skipif(
    shutil.disk_usage(SHM_DIR).free < 6 * AHEAD_BYTES, reason="little shared memory"
)
async def test_a_version_is_written_to_memory_that_was_made_before_it(tmp_path: Path) -> None:
    weights = {"w": torch.ones(AHEAD_BYTES // 4 + 1)}
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        first = await publisher.publish(weights, deadline_s=DEADLINE_S)
        used = await segment_of(harness, first.version)
        owner = used.split("-")[1]
        made: set[str] = set()
        async with asyncio.timeout(DEADLINE_S):
            while not made:
                await asyncio.sleep(0.01)  # a store tells nobody what it makes ahead
                made = {each.name for each in SHM_DIR.glob(f"rolloutbus-{owner}-*")} - {used}
        second = await publisher.publish(weights, deadline_s=DEADLINE_S)
        assert {await segment_of(harness, second.version)} == made


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_bytes_changed_after_the_seal_are_not_staged(
    tmp_path: Path, seed: int, transport: Transport
) -> None:
    model = TiedModel(seed)
    async with store_harness(tmp_path) as harness:
        version = (await WeightPublisher(harness).publish(model, deadline_s=DEADLINE_S)).version
        async with BulkLink(harness.bulk) as link:
            manifest = await link.ask("pull_manifest", PullManifest("default", version))
        assert isinstance(manifest, Manifest)
        tensor = manifest.tensors[-1]
        SegmentWriter().content(manifest.segment, manifest.size_bytes)[tensor.offset] ^= 1
        receiver = receiver_of(model)
        with pytest.raises(EngineFailed) as caught:
            await receiver.prepare(prepare(harness, version, transport), timeout_s=DEADLINE_S)
    assert (caught.value.code, caught.value.field) == ("digest_mismatch", f"tensors.{tensor.name}")
    with pytest.raises(KeyError):
        receiver.staged(version)


def _with(specs: list[TensorSpec], first: TensorSpec) -> list[TensorSpec]:
    return [first, *specs[1:]]


SPECS = specs_of(TiedModel(0))
EXTRA = TensorSpec("extra", "F32", (1,), 4)


@pytest.mark.parametrize(
    ("specs", "field"),
    [
        (SPECS[1:], "tensors.embed"),
        ([*SPECS, EXTRA], "tensors.extra"),
        (_with(SPECS, TensorSpec("embed", "F32", (257, 1031), 0)), "tensors.embed"),
        (_with(SPECS, TensorSpec("embed", "F16", (1031, 257), 0)), "tensors.embed"),
    ],
    ids=["unknown", "missing", "shape", "dtype"],
)
async def test_weights_of_another_model_are_refused_naming_the_tensor(
    tmp_path: Path, seed: int, specs: list[TensorSpec], field: str
) -> None:
    model = TiedModel(seed)
    async with store_harness(tmp_path) as harness:
        version = (await WeightPublisher(harness).publish(model, deadline_s=DEADLINE_S)).version
        receiver = WeightReceiver(specs, ways_of_this_host())
        with pytest.raises(Refused) as caught:
            await receiver.prepare(prepare(harness, version), timeout_s=DEADLINE_S)
    assert (caught.value.code, caught.value.field) == ("bad_request", field)
    advice = "WeightPublisher(dtype=torch.float16)"
    assert (advice in caught.value.problem.message) == (specs[0].dtype == "F16")


async def test_a_pull_survives_the_restart_of_the_store(tmp_path: Path, seed: int) -> None:
    model = TiedModel(seed)
    async with store_harness(tmp_path, bulk=f"ipc://{tmp_path}/bulk") as harness:
        version = (await WeightPublisher(harness).publish(model, deadline_s=DEADLINE_S)).version
        await harness.kill()
        receiver = receiver_of(model)
        pulling = asyncio.create_task(
            receiver.prepare(prepare(harness, version, "tcp"), timeout_s=DEADLINE_S)
        )
        await harness.start(bulk=f"ipc://{tmp_path}/bulk")
        assert (await pulling).transport == "tcp"
    staged = receiver.staged(version)
    assert digests_staged(staged) == digests_of(model)


async def test_a_version_that_is_not_there_is_said_at_once(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        receiver = receiver_of(TiedModel(seed))
        with pytest.raises(EngineFailed) as caught:
            await receiver.prepare(prepare(harness, 7), timeout_s=DEADLINE_S)
    assert caught.value.code == "version_unavailable"


async def test_a_cast_applies_to_floating_point_tensors_only(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(17, 3), "ids": torch.arange(9)}
    specs = [
        TensorSpec("w", "BF16", (17, 3), 17 * 3 * 2),
        TensorSpec("ids", "I64", (9,), 9 * 8),
    ]
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, dtype=torch.bfloat16)
        version = (await publisher.publish(tensors, deadline_s=DEADLINE_S)).version
        receiver = WeightReceiver(specs, ways_of_this_host())
        await receiver.prepare(prepare(harness, version), timeout_s=DEADLINE_S)
    got = torch.frombuffer(receiver.staged(version)["w"].data, dtype=torch.bfloat16)
    assert torch.equal(got.view(17, 3), tensors["w"].bfloat16())
    receiver.close()


async def test_leaving_an_update_by_an_error_publishes_nothing(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)

        async def fail_in_the_middle() -> None:
            async with publisher.begin(deadline_s=DEADLINE_S) as update:
                await update.put_all(TiedModel(seed))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail_in_the_middle()
        async with publisher.begin(deadline_s=DEADLINE_S) as second:
            assert await second.put_all(TiedModel(seed)) == 2
        assert second.published is not None
        assert second.published.version == 2
