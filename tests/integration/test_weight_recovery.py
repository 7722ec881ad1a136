"""A fleet takes deltas and files, goes back to old weights, and outlives its machine's memory.

That a worker takes a delta shows what it holds: on another base the digests would not come out.
"""

# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rolloutbus
from rolloutbus import RolloutClient, WeightPublisher
from rolloutbus.errors import EngineFailed, Refused
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.fleet_events import unwritten_versions
from rolloutbus.trainer_adapter.publisher.transfer import Published, PublishOptions, RestoreOptions
from rolloutbus.types import FleetStatus
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    UNHURRIED,
    assert_fake_rollout,
    fake_sampling,
    status_when,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]

WORKERS = ["w0", "w1"]
PROMPT = [4, 5, 6]
ALL: RestoreOptions = {"require": "all", "deadline_s": DEADLINE_S}
BY_DELTA: PublishOptions = {**ALL, "transport": "delta"}
BY_DISK: PublishOptions = {**ALL, "transport": "disk"}


def described(weights_dir: Path) -> UpOptions:
    return {
        "workers": len(WORKERS),
        "engine": "fake",
        "weights_dir": weights_dir,
        "lease": UNHURRIED,
    }


def weights(head: float) -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.ones(8, 4), "head.weight": torch.full((4,), head)}


def all_serve(version: int, n_workers: int = len(WORKERS)) -> Callable[[FleetStatus], bool]:
    return lambda status: (
        status.committed == {"default": version}
        and [(each.version, each.state) for each in status.workers]
        == [(version, "ready")] * n_workers
    )


def by(published: Published, transport: str) -> bool:
    """Whether everybody got it so."""
    return published.transport == dict.fromkeys(WORKERS, transport)


async def sample(client: RolloutClient, version: int) -> None:
    rollout = await client.generate(
        PROMPT, fake_sampling(5), versions="latest", deadline_s=DEADLINE_S
    )
    assert rollout.version_runs == [(version, 5)]
    assert_fake_rollout(PROMPT, rollout, 5)


async def test_an_old_version_becomes_active_again_under_a_new_number(tmp_path: Path) -> None:
    async with (
        rolloutbus.up(**described(tmp_path)) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        publisher = WeightPublisher(client)
        for head in (1.0, 2.0):
            await publisher.publish(weights(head), **ALL)
        restored = await publisher.restore(1, **ALL)
        assert (restored.version, restored.quarantined) == (3, {})
        await sample(client, 3)
        step = await publisher.publish(weights(3.0), **BY_DELTA)
        assert by(step, "delta"), step.why
        await sample(client, 4)


async def test_the_next_fleet_begins_with_the_last_version_of_this_one(tmp_path: Path) -> None:
    async with (
        rolloutbus.up(**described(tmp_path)) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        publisher = WeightPublisher(client)
        await publisher.publish(weights(1.0), **ALL)
        filed = await publisher.publish(weights(2.0), **BY_DISK)
        assert by(filed, "disk"), filed.why
    async with (
        rolloutbus.up(**described(tmp_path)) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        await status_when(client, all_serve(2))
        await sample(client, 2)
        publisher = WeightPublisher(client)
        step = await publisher.publish(weights(3.0), **BY_DELTA)
        assert (step.version, by(step, "delta")) == (3, True), step.why


async def test_a_version_that_does_not_come_into_the_directory_is_told(tmp_path: Path) -> None:
    in_the_way = tmp_path / "default"  # of the policy's own directory
    in_the_way.touch()
    async with (
        rolloutbus.up(**described(tmp_path)) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        publisher = WeightPublisher(client)
        await publisher.publish(weights(1.0), **ALL)
        await status_when(client, lambda status: unwritten_versions(status) == 1)
        in_the_way.unlink()
        await publisher.publish(weights(2.0), **ALL)
        await status_when(client, lambda status: unwritten_versions(status) == 0)
        assert (in_the_way / "2").is_dir()


async def test_a_trainers_label_outlives_the_router_and_the_store(tmp_path: Path) -> None:
    async with (
        rolloutbus.up(**described(tmp_path)) as fleet,
        rolloutbus.connect(fleet.address) as client,
        rolloutbus.connect(fleet.address, name="rank-1") as other,
    ):
        publisher = WeightPublisher(client)
        early = asyncio.create_task(
            other.generate(PROMPT, fake_sampling(5), versions="min-tag:200", deadline_s=START_S)
        )
        await publisher.publish(weights(1.0), tag=100, require="all")
        rollout = await other.generate(
            PROMPT, fake_sampling(5), versions="min-tag:100", deadline_s=DEADLINE_S
        )
        assert rollout.version_runs == [(1, 5)]
        before = fleet.pids
        fleet.kill_router()
        fleet.kill_store()
        await status_when(client, lambda status: status.tags == {"default": 100})
        assert all(fleet.pids[name] != before[name] for name in ("router", "store"))
        with pytest.raises(Refused, match="tag 100 is not above 100, the tag of version 1"):
            await publisher.publish(weights(2.0), tag=100, require="all")
        assert not early.done()
        published = await publisher.publish(weights(2.0), tag=200, require="all")
        assert (await early).version_runs == [(published.version, 5)]


async def test_numbers_go_on_when_the_record_of_the_store_is_lost(tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    async with (
        rolloutbus.up(**described(directory)) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        publisher = WeightPublisher(client)
        for head in (1.0, 2.0):
            await publisher.publish(weights(head), **ALL)
        before = fleet.pids["store"]
        await asyncio.to_thread(shutil.rmtree, directory)
        fleet.kill_store()
        await status_when(
            client, lambda status: status.store is not None and fleet.pids["store"] != before
        )
        step = await publisher.publish(weights(3.0), **ALL)
        assert (step.version, set(step.transport.values())) == (3, {"shm"}), step.why
        for worker in WORKERS:
            held = await client.get_weights("head.weight", worker)
            assert (held.version, held.array.tolist()) == (3, [3.0] * 4)


async def test_a_real_model_takes_what_a_step_changed(tiny_model: Path, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    tensors = load_file(tiny_model / "model.safetensors")
    async with (
        rolloutbus.up(model=tiny_model, workers=1, lease=UNHURRIED) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        publisher = WeightPublisher(client)
        await publisher.publish(tensors, **ALL)
        for each in tensors.values():
            changed = torch.randint(each.numel(), (1 + each.numel() // 1000,), generator=chance)
            each.view(-1)[changed] *= 1.01
        step = await publisher.publish(tensors, **BY_DELTA)
        assert step.transport == {"w0": "delta"}, step.why
        assert step.moved_bytes["w0"] < sum(each.nbytes for each in tensors.values()) / 50


@pytest.mark.shows("validate_weights")
async def test_zeros_that_are_meant_are_published_restored_and_caught_up_to(
    tiny_model: Path,
) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    zeroed = min(name for name in tensors if "layernorm" in name)
    async with (
        rolloutbus.up(model=tiny_model, workers=1, lease=UNHURRIED) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        publisher = WeightPublisher(client)
        full = await publisher.publish(tensors, **ALL)
        tensors[zeroed].zero_()
        with pytest.raises(Refused, match="allow_zeros=True"):
            await publisher.publish(tensors, **ALL)
        # One that begins again knows nothing of earlier versions; the worker does.
        with pytest.raises(EngineFailed, match="allow_zeros=True"):
            await WeightPublisher(client).publish(tensors, **ALL)
        meant = await WeightPublisher(client).publish(tensors, allow_zeros=True, **ALL)
        await publisher.restore(full.version, **ALL)
        again = await publisher.restore(meant.version, **ALL)
        before = (await client.status()).workers[0].epoch
        fleet.kill("w0")  # and comes back with the values of its checkpoint
        status = await status_when(
            client,
            lambda status: (
                all_serve(again.version, 1)(status) and status.workers[0].epoch != before
            ),
            START_S,
        )
        assert status.counters["catch_ups"] >= 1
