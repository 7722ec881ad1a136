"""What a fleet really holds: compared with the store, fetched by name, torn and mended."""

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.errors import EngineFailed, RequestError
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.publisher.transfer import Published
from rolloutbus.types import FleetStatus
from tests.integration.live_fleet import DEADLINE_S, START_S, UNHURRIED, status_when

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 2, "engine": "fake", "lease": UNHURRIED}
WORKERS = ["w0", "w1"]
PROMPT = [5, 6, 7]
SAMPLING = SamplingParams(max_new_tokens=4, ignore_eos=True)


def weights(seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (8, 4), "head.weight": (4,)}
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


async def publish(client: RolloutClient, tensors: dict[str, torch.Tensor]) -> Published:
    publisher = WeightPublisher(client)
    published = await publisher.publish(tensors, require="all", deadline_s=DEADLINE_S)
    assert published.quarantined == {}
    return published


def states_are(status: FleetStatus, state: str) -> bool:
    return [worker.state for worker in status.workers] == [state] * len(WORKERS)


async def rolloutbus(fleet: Fleet, *arguments: str) -> tuple[int, str]:
    """Exit status and what was printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "rolloutbus.cli.main", *arguments, "--address", fleet.address),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode()


async def test_first_weights_are_compared_with_the_other_workers(client: RolloutClient) -> None:
    report = await client.check_weights()
    assert report.is_ok
    assert sorted(report.by_worker) == WORKERS
    assert {each.is_in_store for each in report.by_worker.values()} == {False}


async def test_published_weights_are_compared_with_the_store(client: RolloutClient) -> None:
    published = await publish(client, weights(1))
    report = await client.check_weights()
    assert report.is_ok
    for each in report.by_worker.values():
        assert (each.version, each.is_in_store, each.n_tensors) == (published.version, True, 2)
    one = await client.check_weights(["head.weight"], target="w1")
    assert {name: each.n_tensors for name, each in one.by_worker.items()} == {"w1": 1}
    assert one.is_ok


async def test_a_worker_lists_what_a_version_must_hold(client: RolloutClient) -> None:
    listed = await client.list_weights()
    assert {each.name: (each.dtype, each.shape) for each in listed} == {
        name: ("F32", tuple(each.shape)) for name, each in weights(0).items()
    }
    assert await client.list_weights("w1") == listed


async def test_a_tensor_that_nobody_has_is_an_error_of_each_worker(client: RolloutClient) -> None:
    report = await client.check_weights(["nonsense"])
    assert sorted(report.errors) == WORKERS
    assert not report.is_ok


async def test_a_tensor_can_be_fetched_by_name(client: RolloutClient) -> None:
    tensors = weights(2)
    published = await publish(client, tensors)
    tensor = await client.get_weights("embed.weight", "w1")
    assert (tensor.version, tensor.dtype, tensor.shape) == (published.version, "F32", (8, 4))
    np.testing.assert_array_equal(tensor.array, tensors["embed.weight"].numpy())
    with pytest.raises(RequestError) as caught:
        await client.get_weights("nonsense", "w1")
    assert caught.value.code == "bad_request"


async def test_the_command_line_tells_the_same(
    client: RolloutClient, fleet: Fleet, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = weights(3)
    published = await publish(client, tensors)
    status, printed = await rolloutbus(fleet, "weights", "check", "--json")
    assert status == 0
    found = json.loads(printed)
    assert found["is_ok"]
    assert found["workers"]["w0"]["version"] == published.version
    status, printed = await rolloutbus(fleet, "weights", "check")
    assert (status, printed.count("the store")) == (0, 2)
    status, printed = await rolloutbus(fleet, "weights", "check", "nonsense")
    assert status == 1
    path = tmp_path / "head.safetensors"
    status, _ = await rolloutbus(fleet, "weights", "get", "head.weight", "-o", str(path))
    assert status == 0
    held = safetensors.load_file(path)
    np.testing.assert_array_equal(held["head.weight"], tensors["head.weight"].numpy())


async def test_workers_that_were_torn_serve_nothing_until_the_next_whole_version(
    client: RolloutClient,
) -> None:
    before = await publish(client, weights(4))
    bad = weights(5)
    bad["head.weight"][0] = float("nan")
    publisher = WeightPublisher(client, check="off")
    torn = await publisher.publish(bad, mode="overwrite", deadline_s=DEADLINE_S)
    assert sorted(torn.quarantined) == WORKERS
    assert all("head.weight" in why for why in torn.quarantined.values())
    status = await status_when(client, lambda status: states_are(status, "torn"))
    assert {worker.version for worker in status.workers} == {before.version}
    assert sorted((await client.check_weights()).errors) == WORKERS
    waiting = asyncio.create_task(
        client.generate(PROMPT, SAMPLING, versions="any", deadline_s=START_S)
    )
    # The router tries to mend them by itself, in vain: the version itself is bad.
    await status_when(client, lambda status: status.counters.get("catch_ups", 0) >= len(WORKERS))
    assert not waiting.done()
    await status_when(client, lambda status: not status.updates)

    mended = await publish(client, weights(6))
    rollout = await waiting
    assert rollout.version_runs == [(mended.version, 4)]
    assert (await client.check_weights()).is_ok


async def test_a_diverged_version_never_becomes_active(client: RolloutClient) -> None:
    good = await publish(client, weights(7))
    bad = weights(8)
    bad["embed.weight"][3, 1] = float("inf")
    with pytest.raises(EngineFailed) as caught:
        await WeightPublisher(client, check="off").publish(bad, deadline_s=DEADLINE_S)
    assert caught.value.code == "update_failed"
    assert "embed.weight" in str(caught.value)
    report = await client.check_weights()
    assert report.is_ok
    assert {each.version for each in report.by_worker.values()} == {good.version}
