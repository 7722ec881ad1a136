"""Two ranks that hold a model together train it as one process does; the fleet has the outcome."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import rolloutbus
from rolloutbus import ShardedSource, SyncWeightPublisher
from rolloutbus.examples.fsdp import N_RANKS, run_rank
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from tests.integration.live_fleet import PATIENT, STEADY_HOST
from tests.integration.plain_runs import train_here

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

N_STEPS = 3
SAME = 1e-4


def joined(_name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts[0].dim() > 1 else parts[0]


def publish_rows(rank: int, address: str, model: Path, ranks: Path) -> None:
    """What a rank does that has its share of each matrix's rows, as Megatron's ranks have."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{ranks}", rank=rank, world_size=N_RANKS)
    parts = {
        name: 2 * each.detach().tensor_split(N_RANKS)[rank] if each.dim() > 1 else each.detach()
        for name, each in load_tiny_model(model).named_parameters()
    }
    source = ShardedSource(parts, merge=joined)
    if rank == 0:
        with rolloutbus.connect_sync(address, name="megatron") as client:
            SyncWeightPublisher(client).publish(source, require="all")
    else:
        source.assist()
    dist.destroy_process_group()


@pytest.mark.shows("FSDP2")
async def test_the_fleet_has_the_weights_that_one_process_would_have_trained(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path, seed=0)
    async with (
        rolloutbus.up(
            model=tmp_path,
            workers=2,
            engine_options={"threads": 1},
            lease=PATIENT,
            host=STEADY_HOST,
        ) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        await asyncio.to_thread(spawn, run_rank, (fleet.address, tmp_path, N_STEPS), nprocs=N_RANKS)
        names = [name for name, _ in load_tiny_model(tmp_path).named_parameters()]
        found = {name: await client.get_weights(name, "w0") for name in names}

    model = load_tiny_model(tmp_path)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    train_here(model, N_STEPS)
    for name, trained in model.named_parameters():
        assert found[name].version == N_STEPS
        np.testing.assert_allclose(found[name].array, trained.detach(), rtol=0, atol=SAME)
        assert (trained - before[name]).abs().max() > 10 * SAME, "nothing was learnt"


@pytest.mark.shows("Megatron shards")
async def test_shares_of_two_ranks_become_the_weights_of_the_fleet(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, seed=0)
    async with (
        rolloutbus.up(
            model=tmp_path,
            workers=1,
            engine_options={"threads": 1},
            lease=PATIENT,
            host=STEADY_HOST,
        ) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        arguments = (fleet.address, tmp_path, tmp_path / "ranks")
        await asyncio.to_thread(spawn, publish_rows, arguments, nprocs=N_RANKS)
        named = dict(load_tiny_model(tmp_path).named_parameters())
        found = {name: await client.get_weights(name, "w0") for name in named}

    for name, before in named.items():
        by = 2 if before.dim() > 1 else 1
        assert found[name].version == 1
        assert np.array_equal(found[name].array, by * before.detach()), name
