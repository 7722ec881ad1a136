"""Publishing in the background: when tensors may change, what is seen of it, how it is ended."""

# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import asyncio
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rolloutbus.bus.actor.ref import STORE
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import bytes_of, checksum, digest_of, lay_out
from rolloutbus.bus.weights.shm import SHM_DIR, SegmentWriter
from rolloutbus.bus.wire.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    PeerLost,
    Refused,
    RequestCancelled,
    SettingsError,
)
from rolloutbus.bus.wire.messages.weights import (
    Bucket,
    Manifest,
    Offer,
    PullManifest,
    Reserved,
    ReserveVersion,
    SealVersion,
    Tensor,
    UpdateProgress,
    VerifyTensors,
)
from rolloutbus.trainer_adapter.client.core.results import FleetCommandFailed, FleetResult
from rolloutbus.trainer_adapter.publisher import early_verification
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from rolloutbus.trainer_adapter.publisher.early_verification import EarlyVerification, Tell
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from rolloutbus.trainer_adapter.publisher.tensor_source import HeldTensors, Layout
from rolloutbus.trainer_adapter.publisher.transfer import TransferProgress, WeightTransferHandle
from rolloutbus.trainer_adapter.publisher.weight_writer import WeightWriter
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.store_harness import store_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(64, 32, generator=generator) for i in range(4)}


def digests_of(tensors: Weights) -> dict[str, int]:
    return {
        name: digest_of(each.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().copy())
        for name, each in tensors.items()
    }


class SlowTensors(HeldTensors):
    """Are not to be had before `go` is set."""

    def __init__(self, tensors: Weights) -> None:
        super().__init__(tensors)
        self.go = threading.Event()

    def buckets(self) -> Generator[Sequence[torch.Tensor]]:
        assert self.go.wait(DEADLINE_S)
        yield from super().buckets()


async def phase_comes(handle: WeightTransferHandle, phase: str) -> TransferProgress:
    async with asyncio.timeout(DEADLINE_S):
        async for progress in handle.changes():
            if progress.phase == phase:
                return progress
    raise AssertionError(f"it ended without {phase}")


async def test_tensors_may_change_as_soon_as_they_are_copied(tmp_path: Path, seed: int) -> None:
    model = weights(seed)
    as_published = digests_of(model)
    async with store_harness(tmp_path) as harness:
        harness.updates.decides.clear()
        handle = WeightPublisher(harness).start(model, deadline_s=DEADLINE_S)
        await handle.copied()
        for each in model.values():
            each.zero_()
        assert not handle.is_done
        harness.updates.decides.set()
        published = await handle
        assert await harness.digests_kept(published.version) == as_published


async def test_the_store_verifies_tensors_while_others_are_written(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_verification, "PART_BYTES", 1)
    monkeypatch.setattr(early_verification, "PARTS", 4)
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        published = await WeightPublisher(harness).publish(model, deadline_s=DEADLINE_S)
        writing = harness.asked[: harness.asked.index("seal_version") + 1]
        assert writing == ["reserve_version", *["verify_tensors"] * 4, "seal_version"]
        assert await harness.digests_kept(published.version) == digests_of(model)


async def test_bytes_that_were_not_there_yet_are_read_again_by_the_seal(
    tmp_path: Path, seed: int
) -> None:
    model = weights(seed)
    layout = lay_out((name, "F32", tuple(each.shape)) for name, each in model.items())
    digests = [*digests_of(model).values()]
    async with store_harness(tmp_path) as harness:
        store = harness.ref(STORE)

        async def ask(body: msgspec.Struct) -> FleetResult:
            result = await store.ask(body, deadline_s=DEADLINE_S)
            assert isinstance(result, FleetResult)
            return result

        reserved = (await ask(ReserveVersion("default", layout))).only(Reserved)
        early = VerifyTensors("default", reserved.version, [0, 1, 2, 3], digests)
        (await ask(early)).check()

        with pytest.raises(FleetCommandFailed, match="w0"):
            (await ask(SealVersion("default", reserved.version, digests))).check()
        content = SegmentWriter().content(reserved.segment, reserved.size_bytes)
        for place, each in zip(layout, model.values(), strict=True):
            bytes_of(content, place)[:] = each.view(-1).view(torch.uint8).numpy()
        (await ask(SealVersion("default", reserved.version, digests))).check()
        assert await harness.digests_kept(reserved.version) == digests_of(model)


async def test_a_store_that_leaves_right_after_a_commit_leaves_well(tmp_path: Path) -> None:
    """It still has older versions to retire then."""
    for number in range(4):
        place = tmp_path / str(number)
        place.mkdir(mode=0o700)
        async with store_harness(place) as harness:
            publisher = WeightPublisher(harness)
            for _ in range(4):
                await publisher.publish({"a": torch.ones(9)}, deadline_s=DEADLINE_S)
            assert await harness.stop() == 0


def deleted_segments() -> set[str]:
    """Files of shared memory that this process still maps, though they are gone."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {each.split()[5] for each in lines if "(deleted)" in each and str(SHM_DIR) in each}


async def test_an_error_that_is_kept_keeps_no_memory_of_the_version(tmp_path: Path) -> None:
    broken = {"w": torch.full((1 << 20,), torch.nan)}
    others = deleted_segments()  # of tests before
    kept: list[Refused] = []
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        for _ in range(2):
            with pytest.raises(Refused, match="NaN") as caught:
                await publisher.publish(broken, deadline_s=DEADLINE_S)
            kept.append(caught.value)
        assert deleted_segments() <= others


@pytest.mark.timeout(60)  # the loop that would not end is the test's own
async def test_an_error_that_is_its_own_cause_leaves_its_block_at_once(
    tmp_path: Path, seed: int
) -> None:
    own = ValueError("of the trainer")
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        with pytest.raises(ValueError, match="of the trainer"):
            async with publisher.begin(deadline_s=DEADLINE_S):
                raise own from own
        await publisher.publish(weights(seed), deadline_s=DEADLINE_S)


async def test_a_store_that_leaves_while_it_verifies_leaves_nothing_behind(tmp_path: Path) -> None:
    n_bytes = 512 << 20  # are read for a while
    layout = lay_out([("w0", "U8", (n_bytes,))])
    digests = [digest_of(np.zeros(n_bytes, np.uint8))]  # of new memory
    async with store_harness(tmp_path) as harness:

        async def ask(body: msgspec.Struct) -> FleetResult:
            result = await harness.ref(STORE).ask(body, deadline_s=DEADLINE_S)
            assert isinstance(result, FleetResult)
            return result

        reserved = (await ask(ReserveVersion("default", layout))).only(Reserved)
        early = VerifyTensors("default", reserved.version, [0], digests)
        (await ask(early)).check()
        seal = SealVersion("default", reserved.version, digests)
        sealing = asyncio.create_task(ask(seal))
        await asyncio.sleep(0)  # it is sent first
        assert (await ask(early)).errors  # the seal has come

        assert await harness.stop() == 0

        sealing.cancel()
        assert not (SHM_DIR / reserved.segment).exists()


class Adapted:
    """A model whose iterator merges an adapter while it is open; its tensors share a buffer."""

    def __init__(self, base: Weights) -> None:
        self.base = base
        self.is_merged = False

    def merged(self) -> Weights:
        return {name: each + 1 for name, each in self.base.items()}

    def __iter__(self) -> Generator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(64, 32)
        self.is_merged = True
        try:
            for name, each in self.base.items():
                yield name, torch.add(each, 1, out=buffer)
                buffer.copy_(each)
        finally:
            self.is_merged = False


def layout_of(tensors: Weights) -> Layout:
    return [(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]


@pytest.mark.parametrize("push", ["shm", "tcp"])
@pytest.mark.parametrize("has_layout", [True, False], ids=["layout", "no layout"])
async def test_an_iterators_tensors_are_published_as_they_were_given(
    tmp_path: Path, seed: int, push: str, *, has_layout: bool
) -> None:
    base = weights(seed)
    model = Adapted(base)
    layout = layout_of(base) if has_layout else None
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, writer=WeightWriter(may_map=push == "shm"))
        publisher.offer("collective", CollectiveOffering())
        published = await publisher.publish(
            iter(model), layout=layout, transport="collective", deadline_s=DEADLINE_S
        )
        assert not model.is_merged
        assert await harness.digests_kept(published.version) == digests_of(model.merged())
        [offer] = harness.updates.published[-1].offers
        async with BulkLink(harness.bulk) as link:
            manifest = await link.ask("pull_manifest", PullManifest("default", 1))
    assert isinstance(manifest, Manifest)
    whole = torch.cat([each.view(-1) for each in model.merged().values()]).view(torch.uint8)
    assert offer.transport == "collective"
    assert [each.checksum for each in manifest.offers[0].buckets] == [checksum(whole.numpy())]


async def test_an_iterator_is_closed_when_its_version_is_refused(tmp_path: Path, seed: int) -> None:
    base = weights(seed)
    model = Adapted(base)
    layout = [(name, dtype, shape) for name, dtype, shape in layout_of(base) if name != "w2"]
    async with store_harness(tmp_path) as harness:
        publishing = WeightPublisher(harness).publish(
            iter(model), layout=layout, deadline_s=DEADLINE_S
        )
        with pytest.raises(Refused) as caught:
            await publishing
    assert caught.value.field == "layout.w3"
    assert not model.is_merged


async def test_a_refused_or_cancelled_version_gives_its_memory_back_at_once(
    tmp_path: Path, seed: int
) -> None:
    size = 48 << 20

    def taken() -> int:
        return sum(each.stat().st_size for each in SHM_DIR.glob(f"rolloutbus-{owner}-*"))

    bad = {"w": torch.full((size // 4,), torch.nan)}
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        first = await publisher.publish(weights(seed), deadline_s=DEADLINE_S)
        async with BulkLink(harness.bulk) as link:
            manifest = await link.ask("pull_manifest", PullManifest("default", first.version))
        assert isinstance(manifest, Manifest)
        owner = manifest.segment.split("-")[1]
        before = taken()
        for _ in range(3):
            with pytest.raises(Refused):
                await publisher.publish(bad, deadline_s=DEADLINE_S)
            assert taken() == before
        slow = SlowTensors(weights(seed))
        handle = publisher.start(slow, deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            async for progress in handle.changes():
                if progress.version:
                    break
        cancelling = asyncio.create_task(handle.cancel())
        slow.go.set()
        assert await cancelling
        assert taken() == before


async def test_a_refused_model_may_be_repaired_and_put_again_in_the_same_block(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    closed: list[int] = []
    made, close = EarlyVerification.__init__, EarlyVerification.close

    def noted(early: EarlyVerification, layout: list[Tensor], tell: Tell) -> None:
        told.append(id(early))
        made(early, layout, tell)

    def noted_close(early: EarlyVerification) -> None:
        closed.append(id(early))
        close(early)

    monkeypatch.setattr(EarlyVerification, "__init__", noted)
    monkeypatch.setattr(EarlyVerification, "close", noted_close)
    model = weights(seed)
    broken = {**model, "w3": torch.full((64, 32), torch.nan)}
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        publisher.offer("collective", CollectiveOffering())
        async with publisher.begin(transport="collective", deadline_s=DEADLINE_S) as update:
            for _ in range(2):
                with pytest.raises(Refused, match="NaN"):
                    await update.put_all(broken)
            version = await update.put_all(model)
        assert update.published is not None
        assert update.published.version == version
        assert await harness.digests_kept(version) == digests_of(model)
        # Each of the others is given back before the next one is asked for.
        steps = [each for each in harness.asked if each != "verify_tensors"]
        again = ["reserve_version", "settle_version"]
        assert steps[:6] == [*again, *again, "reserve_version", "seal_version"]
        assert len(told) == 3
        assert set(told) == set(closed)
        [offer] = harness.updates.published[-1].offers
        assert offer.transport == "collective"


async def test_two_models_at_once_are_not_taken_in_one_block(tmp_path: Path, seed: int) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        async with WeightPublisher(harness).begin(deadline_s=DEADLINE_S) as update:
            first = asyncio.create_task(update.put_all(model))
            await asyncio.sleep(0)  # it begins
            with pytest.raises(LocalProtocolError, match="in one put_all"):
                await update.put_all({"w": torch.zeros(1)})
            assert await first == 1
        assert await harness.digests_kept(1) == digests_of(model)
        assert harness.asked.count("reserve_version") == 1


async def test_a_version_of_unknown_outcome_is_settled_for_good(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        with pytest.raises(Refused):
            await publisher.outcome()
        await publisher.publish(weights(seed), deadline_s=DEADLINE_S)
        harness.updates.decides.clear()
        handle = publisher.start(weights(seed), deadline_s=DEADLINE_S)
        await phase_comes(handle, "preparing")
        assert await handle.cancel()
        assert await publisher.outcome() == "not_committed"
        assert await publisher.outcome(1) == "committed"


async def test_every_listener_sees_the_way_to_the_end(tmp_path: Path, seed: int) -> None:
    async def phases(handle: WeightTransferHandle) -> list[TransferProgress]:
        return [progress async for progress in handle.changes()]

    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        handle = WeightPublisher(harness).start(model, deadline_s=DEADLINE_S)
        listeners = [asyncio.create_task(phases(handle)) for _ in range(2)]
        waiters = [asyncio.create_task(result_of(handle)) for _ in range(2)]
        async with asyncio.timeout(DEADLINE_S):
            versions = {await each for each in waiters}
            seen = [await each for each in listeners]
    assert versions == {1}
    order = ["copying", "sealing", "preparing", "committed"]
    for each in seen:
        assert [phase for phase in order if phase in {one.phase for one in each}] == order
        last = each[-1]
        assert (last.phase, last.version) == ("committed", 1)
        assert last.copied_bytes == sum(one.nbytes for one in model.values())
        assert (last.n_targets, last.n_prepared) == (2, 1)


async def result_of(handle: WeightTransferHandle) -> int:
    return (await handle).version


async def test_cancelling_who_waits_leaves_the_version_on_its_way(
    tmp_path: Path, seed: int
) -> None:
    async with store_harness(tmp_path) as harness:
        harness.updates.decides.clear()
        handle = WeightPublisher(harness).start(weights(seed), deadline_s=DEADLINE_S)
        waiter = asyncio.create_task(result_of(handle))
        await phase_comes(handle, "preparing")
        waiter.cancel()
        await asyncio.wait((waiter,))
        harness.updates.decides.set()
        assert (await handle).version == 1
        assert harness.updates.committed == [1]


async def test_cancel_while_tensors_are_copied_publishes_nothing(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        slow = SlowTensors(weights(seed))
        handle = publisher.start(slow, deadline_s=DEADLINE_S)
        await phase_comes(handle, "copying")
        handle.stop()
        slow.go.set()
        assert await handle.cancel()
        assert handle.progress.phase == "aborted"
        with pytest.raises(RequestCancelled):
            await handle.copied()
        await publisher.publish(weights(seed), deadline_s=DEADLINE_S)
        assert len(harness.updates.published) == 1


async def test_cancel_before_its_turn_publishes_nothing(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        slow = SlowTensors(weights(seed))
        first = publisher.start(slow, deadline_s=DEADLINE_S)
        second = publisher.start(weights(seed), deadline_s=DEADLINE_S)
        third = publisher.start(weights(seed), deadline_s=DEADLINE_S)
        assert await second.cancel()
        slow.go.set()
        assert [(await first).version, (await third).version] == [1, 2]


async def test_a_deadline_before_its_turn_publishes_nothing(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        async with publisher.begin(deadline_s=DEADLINE_S) as update:
            with pytest.raises(DeadlineExceeded, match="the update before has not ended") as caught:
                await publisher.publish(weights(seed), deadline_s=0.01)
            assert caught.value.outcome == "not_started"
            with pytest.raises(DeadlineExceeded, match="the update before has not ended"):
                await publisher.publish_lora("a", {}, alpha=1.0, deadline_s=0.01)
            with pytest.raises(DeadlineExceeded, match="ask again"):
                await publisher.outcome(deadline_s=0.01)
            await update.put_all(weights(seed))
        assert harness.asked.count("reserve_version") == 1


async def test_memory_is_given_back_when_the_version_that_uses_it_has_come_through(
    tmp_path: Path, seed: int
) -> None:
    async with store_harness(tmp_path) as harness:
        harness.updates.decides.clear()
        offering = CollectiveOffering()
        publisher = WeightPublisher(harness)
        publisher.offer("collective", offering)
        handle = publisher.start(weights(seed), transport="collective", deadline_s=DEADLINE_S)
        await handle.copied()
        publisher.forget()
        assert offering.held_bytes > 0
        harness.updates.decides.set()
        await handle
        assert offering.held_bytes == 0


async def test_cancel_before_the_commit_is_recorded_ends_the_update(
    tmp_path: Path, seed: int
) -> None:
    async with store_harness(tmp_path) as harness:
        harness.updates.decides.clear()
        publisher = WeightPublisher(harness)
        handle = publisher.start(weights(seed), deadline_s=DEADLINE_S)
        await phase_comes(handle, "preparing")
        assert await handle.cancel()
        harness.updates.decides.set()
        assert (await publisher.publish(weights(seed), deadline_s=DEADLINE_S)).version == 2
        assert harness.updates.committed == [2]


async def test_cancel_after_the_commit_says_that_it_is_too_late(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        handle = WeightPublisher(harness).start(weights(seed), deadline_s=DEADLINE_S)
        await phase_comes(handle, "committed")
        assert not await handle.cancel()
        assert (await handle).version == 1


async def test_a_cancelled_publish_cancels_its_update(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        harness.updates.decides.clear()
        publisher = WeightPublisher(harness)
        publishing = asyncio.create_task(publisher.publish(weights(seed), deadline_s=DEADLINE_S))
        async with asyncio.timeout(DEADLINE_S):
            await harness.updates.asked.wait()
        publishing.cancel()
        await asyncio.wait((publishing,))
        harness.updates.decides.set()
        await publisher.publish(weights(seed), deadline_s=DEADLINE_S)
        assert harness.updates.committed == [2]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
async def test_a_diverged_model_is_refused_before_anybody_gets_it(
    tmp_path: Path, seed: int, wrong: float
) -> None:
    model = weights(seed)
    model["w2"][63, 31] = wrong
    async with store_harness(tmp_path) as harness:
        with pytest.raises(Refused) as caught:
            await WeightPublisher(harness).publish(model, deadline_s=DEADLINE_S)
        assert caught.value.field == "tensors.w2"
        assert harness.updates.published == []
        anyway = WeightPublisher(harness, check="off")
        assert (await anyway.publish(model, deadline_s=DEADLINE_S)).version == 2


async def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    async with store_harness(tmp_path) as harness:
        with pytest.raises(Refused):
            await WeightPublisher(harness, dtype=torch.float16).publish(
                {"w": torch.full((3,), 1e6)}, deadline_s=DEADLINE_S
            )


async def test_zeros_are_refused_only_where_there_were_values(tmp_path: Path, seed: int) -> None:
    model = weights(seed) | {"adapter": torch.zeros(8)}
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        for _ in range(2):
            await publisher.publish(model, deadline_s=DEADLINE_S)
        model["w1"].zero_()
        with pytest.raises(Refused) as caught:
            await publisher.publish(model, deadline_s=DEADLINE_S)
    assert caught.value.field == "tensors.w1"


async def test_the_engine_gets_its_own_names_and_only_what_it_is_given(
    tmp_path: Path, seed: int
) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(
            harness, rename=lambda name: None if name == "w3" else f"model.{name}"
        )
        version = (await publisher.publish(model, deadline_s=DEADLINE_S)).version
        kept = await harness.digests_kept(version)
    wanted = {f"model.{name}": each for name, each in digests_of(model).items() if name != "w3"}
    assert kept == wanted


def files_open_in(directory: Path) -> set[str]:
    found = {link.resolve() for link in Path("/proc/self/fd").iterdir()}
    return {each.name for each in found if each.parent == directory.resolve()}


async def test_the_files_of_a_directory_are_cast_renamed_and_closed(
    tmp_path: Path, seed: int
) -> None:
    model, path = weights(seed), tmp_path / "step-1"
    path.mkdir()
    save_file(model, path / "model.safetensors")
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(
            harness, dtype=torch.bfloat16, rename=lambda name: None if name == "w3" else f"m.{name}"
        )
        version = (await publisher.publish(path, deadline_s=DEADLINE_S)).version
        kept = await harness.digests_kept(version)
        save_file({**model, "w2": torch.full((4,), torch.nan)}, path / "model.safetensors")
        with pytest.raises(Refused) as caught:
            await publisher.publish(str(path), deadline_s=DEADLINE_S)
    assert kept == {
        f"m.{name}": digest
        for name, digest in digests_of({n: each.bfloat16() for n, each in model.items()}).items()
        if name != "w3"
    }
    assert caught.value.field == "tensors.m.w2"
    assert files_open_in(path) == set()


async def test_files_are_closed_where_nothing_of_theirs_is_published(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    save_file(weights(seed), path / "model.safetensors")
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, rename=lambda _: None)
        with pytest.raises(SettingsError, match="there are no tensors to publish"):
            await publisher.publish(path, deadline_s=DEADLINE_S)
    assert files_open_in(path) == set()


async def test_a_lone_shard_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    class Shard(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            raise NotImplementedError

        def to_local(self) -> torch.Tensor:
            return torch.zeros(1)

    async with store_harness(tmp_path) as harness:
        with pytest.raises(SettingsError, match="ShardedSource"):
            WeightPublisher(harness).start({"w": torch.zeros(2).as_subclass(Shard)})


async def test_what_is_asked_for_reaches_the_router(tmp_path: Path, seed: int) -> None:
    async with store_harness(tmp_path) as harness:
        await WeightPublisher(harness).publish(
            weights(seed),
            in_flight="retract",
            require="at-least:2",
            transport="tcp",
            mode="overwrite",
            floor=3,
            deadline_s=DEADLINE_S,
        )
    [body] = harness.updates.published
    assert (body.in_flight, body.require, body.transport) == ("retract", "at-least:2", "tcp")
    assert (body.mode, body.floor) == ("overwrite", 3)


@pytest.mark.parametrize("require", ["most", "at-least:0", "at-least:", "", "at-least:-1"])
async def test_a_rule_that_is_none_is_refused_before_anything_is_copied(
    tmp_path: Path, seed: int, require: str
) -> None:
    async with store_harness(tmp_path) as harness:
        with pytest.raises(Refused) as caught:
            WeightPublisher(harness).start(weights(seed), require=require)
    assert caught.value.field == "require"


class Window:
    """An offering that shows what became of it."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def prepare(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Offer]:
        assert [each.size_bytes for each in layout] == [each.nbytes for each in tensors]
        self.steps.append("prepared")
        return [Offer("collective", at="127.0.0.1:1", buckets=[Bucket(0, 8, 5)])]

    async def serve(self) -> None:
        self.steps.append("serving")
        try:
            await asyncio.Event().wait()
        finally:
            self.steps.append("stopped")

    def call_off(self) -> None:
        self.steps.append("called off")

    async def close(self) -> None:
        self.steps.append("closed")

    def forget(self) -> None:
        self.steps.append("forgotten")


async def test_an_offer_is_served_while_the_router_publishes_and_closed_after_it(
    tmp_path: Path, seed: int
) -> None:
    window = Window()
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        publisher.offer("collective", window)
        await publisher.publish(weights(seed), deadline_s=DEADLINE_S)
        assert window.steps == []
        await publisher.publish(weights(seed), transport="collective", deadline_s=DEADLINE_S)
        publisher.forget()
    assert window.steps == ["prepared", "serving", "stopped", "closed", "forgotten"]
    assert harness.updates.published[1].offers == [
        Offer("collective", at="127.0.0.1:1", router="test")
    ]


async def test_an_offer_is_called_off_when_the_workers_are_told_a_second_time(
    tmp_path: Path, seed: int
) -> None:
    window = Window()
    async with store_harness(tmp_path) as harness:
        desk = harness.updates
        desk.decides.clear()
        publisher = WeightPublisher(harness)
        publisher.offer("collective", window)
        handle = publisher.start(weights(seed), transport="collective", deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await desk.asked.wait()
        [tell] = desk.listeners
        tell(UpdateProgress(1, "preparing", 2, update="update-1"))
        tell(UpdateProgress(1, "preparing", 2, update="update-1"))
        assert "called off" not in window.steps
        tell(UpdateProgress(1, "preparing", 2, n_prepared=1, update="update-2"))
        desk.decides.set()
        await handle
    assert window.steps == ["prepared", "serving", "called off", "stopped", "closed"]


async def test_zeros_are_compared_with_the_last_version_that_was_committed(
    tmp_path: Path, seed: int
) -> None:
    model = weights(seed)
    zeros = {**model, "w0": torch.zeros(64, 32)}
    async with store_harness(tmp_path) as harness:
        desk = harness.updates
        publisher = WeightPublisher(harness)

        async def publish_in_vain(tensors: Weights, *, allow_zeros: bool = False) -> None:
            desk.asked.clear()
            desk.decides.clear()
            handle = publisher.start(tensors, allow_zeros=allow_zeros, deadline_s=DEADLINE_S)
            async with asyncio.timeout(DEADLINE_S):
                await desk.asked.wait()
            assert await handle.cancel()
            desk.decides.set()

        await publish_in_vain(model)
        await publisher.publish(zeros, deadline_s=DEADLINE_S)  # nothing was committed before
        await publisher.publish(model, deadline_s=DEADLINE_S)
        await publish_in_vain(zeros, allow_zeros=True)
        with pytest.raises(Refused, match="allow_zeros=True") as caught:
            await publisher.publish(zeros, deadline_s=DEADLINE_S)
        assert caught.value.field == "tensors.w0"


async def test_a_deadline_while_weights_are_written_says_how_far_they_were(
    tmp_path: Path, seed: int
) -> None:
    async with store_harness(tmp_path) as harness:
        slow = SlowTensors(weights(seed))
        handle = WeightPublisher(harness).start(slow, deadline_s=8.0)  # a busy store reserves late
        await phase_comes(handle, "copying")
        asyncio.get_running_loop().call_later(8.5, slow.go.set)
        with pytest.raises(
            DeadlineExceeded, match=r"written: \d+ of 32768 bytes were copied, phase"
        ):
            await handle


async def test_a_store_that_dies_while_it_is_written_to_is_blamed_by_its_name(
    tmp_path: Path, seed: int
) -> None:
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        slow = SlowTensors(weights(seed))
        handle = publisher.start(slow, deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            async for progress in handle.changes():
                if progress.version:  # there is a place for it
                    break
        await harness.kill()
        await harness.start()
        slow.go.set()
        with pytest.raises(PeerLost, match="lost version 1 while it was written") as caught:
            await handle
        assert caught.value.outcome == "not_started"
        assert (await publisher.publish(weights(seed), deadline_s=DEADLINE_S)).version > 1


async def test_an_adapter_for_nobody_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.lora_"
    factors = {f"{name}A.weight": torch.ones(2, 4), f"{name}B.weight": torch.ones(4, 2)}
    async with store_harness(tmp_path) as harness:
        with pytest.raises(Refused, match="no worker of policy 'default' is there") as caught:
            await WeightPublisher(harness).publish_lora("a", factors, alpha=4.0)
        assert caught.value.code == "not_ready"


class WrittenLate(HeldTensors):
    """Tensors that are written by work which was queued elsewhere, as by a stream of a GPU."""

    def __init__(self, tensors: Weights) -> None:
        super().__init__(tensors)
        self.is_waited_for, self.are_written = threading.Event(), threading.Event()

    def wait_written(self) -> None:
        self.is_waited_for.set()
        assert self.are_written.wait(DEADLINE_S)


class Copying(CollectiveOffering):
    """Notes what it was given to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[torch.Tensor] = []

    async def prepare(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Offer]:
        self.copied = [each.clone() for each in tensors]
        return await super().prepare(layout, tensors)


async def test_an_offer_is_of_the_tensors_as_they_were_when_the_publication_began(
    tmp_path: Path,
) -> None:
    source = WrittenLate({"w": torch.zeros(8)})
    async with store_harness(tmp_path) as harness:
        publisher, offering = WeightPublisher(harness), Copying()
        publisher.offer("collective", offering)
        handle = publisher.start(source, transport="collective", deadline_s=DEADLINE_S)
        assert await asyncio.to_thread(source.is_waited_for.wait, DEADLINE_S)
        for held in source.held:
            held.fill_(1.0)
        source.are_written.set()
        version = (await handle).version
        expected = torch.ones(8)
        assert await harness.digests_kept(version) == digests_of({"w": expected})
        (copied,) = offering.copied
        assert torch.equal(copied, expected)
