"""Two ranks that hold a model together train it as one process does; the fleet has the outcome."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import spawn

import rolloutbus
from rolloutbus.examples.fsdp import N_RANKS, run_rank
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from tests.integration.plain_runs import train_here

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

N_STEPS = 3
SAME = 1e-4


@pytest.mark.shows("FSDP2")
async def test_the_fleet_has_the_weights_that_one_process_would_have_trained(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path, seed=0)
    async with (
        rolloutbus.up(model=tmp_path, workers=2, engine_options={"threads": 1}) as fleet,
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
