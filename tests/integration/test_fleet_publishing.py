"""Publishing to a live fleet: from plain scripts, back to old content, after a trainer's death."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest
import torch

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SyncWeightPublisher, WeightPublisher
from rolloutbus.errors import EngineFailed, RequestCancelled
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.publisher.transfer import TransferProgress
from rolloutbus.types import FleetStatus
from tests.integration.killed_trainer import WEIGHTS
from tests.integration.live_fleet import DEADLINE_S, PATIENT, START_S, STEADY_HOST, status_when
from tests.integration.store_harness import ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

WORKERS = {"w0", "w1"}
FLEET: UpOptions = {
    "workers": len(WORKERS),
    "engine": "fake",
    "lease": PATIENT,
    "host": STEADY_HOST,
}


async def all_serve(client: RolloutClient) -> int:
    """The committed version, once every worker serves it."""
    status = await status_when(
        client,
        lambda status: (
            {worker.name for worker in status.workers} == WORKERS
            and all(
                (worker.version, worker.state) == (status.committed.get("default", 0), "ready")
                for worker in status.workers
            )
        ),
    )
    return status.committed.get("default", 0)


def tells_of_updates(status: FleetStatus) -> bool:
    """Whether the store says what it holds, and each worker how three updates stalled it."""
    held = status.store.gauges.get("held_bytes", 0) if status.store else 0
    stalls = [each.durations.get("update_stall") for each in status.workers]
    return held > 0 and all(each is not None and sum(each.counts) >= 3 for each in stalls)


def publish_plainly(address: str) -> tuple[list[int], list[TransferProgress]]:
    """What a script without `asyncio` does."""
    with rolloutbus.connect_sync(address, name="plain") as client:
        publisher = SyncWeightPublisher(client)
        first = publisher.publish(WEIGHTS, require="all", deadline_s=DEADLINE_S)
        one_by_one = ((name, each.clone()) for name, each in WEIGHTS.items())
        transfer = publisher.start(one_by_one, require="all", deadline_s=DEADLINE_S)
        transfer.copied()
        changes = list(transfer.changes())
        second = transfer.result()
        assert set(second.stall_ms) == set(second.transport) == WORKERS
        assert transfer.is_done
        assert not transfer.cancel()
        third = publisher.restore(first.version, require="all", deadline_s=DEADLINE_S)
        publisher.forget()
        return [first.version, second.version, third.version], changes


async def test_a_plain_script_publishes_watches_and_goes_back(
    fleet: Fleet, client: RolloutClient
) -> None:
    before = await all_serve(client)
    versions, changes = await asyncio.to_thread(publish_plainly, fleet.address)
    assert versions == [before + 1, before + 2, before + 3]
    last = changes[-1]
    assert (last.phase, last.version) == ("committed", before + 2)
    assert (last.n_targets, last.n_prepared, last.n_active) == (2, 2, 2)
    assert await all_serve(client) == before + 3
    await status_when(client, tells_of_updates)


async def test_a_store_keeps_as_many_versions_as_it_was_told() -> None:
    options: UpOptions = {**FLEET, "workers": 1, "keep_committed": 1}
    async with (
        rolloutbus.up(**options) as fleet,
        rolloutbus.connect(fleet.address, name="keeper") as client,
    ):
        publisher = WeightPublisher(client)
        first = await publisher.publish(WEIGHTS, deadline_s=DEADLINE_S)
        await publisher.publish(WEIGHTS, deadline_s=DEADLINE_S)
        with pytest.raises(EngineFailed, match="version_unavailable"):
            await publisher.restore(first.version, deadline_s=DEADLINE_S)


def publish_piece_by_piece(address: str) -> int:
    """What a script without `asyncio` does that has its tensors one at a time."""
    layout = [(name, each.dtype, tuple(each.shape)) for name, each in WEIGHTS.items()]
    with rolloutbus.connect_sync(address, name="pieces") as client:
        publisher = SyncWeightPublisher(client)
        with (
            contextlib.suppress(ZeroDivisionError),
            publisher.begin(layout=layout, require="all", deadline_s=DEADLINE_S) as given_up,
        ):
            given_up.put(*next(iter(WEIGHTS.items())))
            raise ZeroDivisionError
        assert given_up.published is None
        with publisher.begin(layout=layout, require="all", deadline_s=DEADLINE_S) as update:
            for name, each in WEIGHTS.items():
                update.put(name, each)
        assert update.published is not None
        return update.published.version


async def test_a_plain_script_publishes_tensor_by_tensor(
    fleet: Fleet, client: RolloutClient
) -> None:
    before = await all_serve(client)
    version = await asyncio.to_thread(publish_piece_by_piece, fleet.address)
    assert version == before + 2, "a number is never used twice, nor is what was given up served"
    assert await all_serve(client) == version


async def test_a_killed_trainers_version_is_never_given_to_another(
    fleet: Fleet, client: RolloutClient
) -> None:
    command = [sys.executable, "-m", "tests.integration.killed_trainer", fleet.address]
    trainer = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert trainer.stdout is not None
    async with asyncio.timeout(START_S):
        lost = int(await trainer.stdout.readline())
        trainer.kill()
        await trainer.wait()
    published = await WeightPublisher(client).publish(WEIGHTS, require="all", deadline_s=DEADLINE_S)
    assert published.version > lost
    assert await all_serve(client) == published.version


async def test_cancel_ends_an_update_that_waits_for_a_worker(
    fleet: Fleet, client: RolloutClient
) -> None:
    before = await all_serve(client)
    os.kill(fleet.pids["w1"], signal.SIGSTOP)  # it cannot answer, so the update must wait for it
    try:
        weights = {name: 2 * each for name, each in WEIGHTS.items()}
        handle = WeightPublisher(client).start(weights, require="all", deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            async for progress in handle.changes():
                if progress.n_prepared == 1:
                    break
        # On a slow machine the stopped worker may be given up first, which fails the update.
        with contextlib.suppress(EngineFailed):
            assert await handle.cancel()
    finally:
        os.kill(fleet.pids["w1"], signal.SIGCONT)
    with pytest.raises((RequestCancelled, EngineFailed)):
        await handle
    assert await all_serve(client) == before


async def test_what_is_not_finite_changes_nothing(client: RolloutClient) -> None:
    before = await all_serve(client)
    weights = WEIGHTS | {"head.weight": torch.tensor([1.0, float("nan"), 1.0, 1.0])}
    with pytest.raises(rolloutbus.errors.Refused) as caught:
        await WeightPublisher(client).publish(weights, deadline_s=DEADLINE_S)
    assert caught.value.field == "tensors.head.weight"
    assert await all_serve(client) == before
