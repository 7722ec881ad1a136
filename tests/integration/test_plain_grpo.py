"""A run on the bus is the run that it would be with generation in the trainer's own process."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

import rolloutbus
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from tests.integration.live_fleet import PATIENT, START_S, STEADY_HOST
from tests.integration.plain_runs import train_here, train_there

pytestmark = [pytest.mark.integration, pytest.mark.timeout(4 * START_S)]

N_STEPS = 6
SAME = 1e-5


async def test_losses_rewards_and_weights_are_those_of_a_run_without_a_bus(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path, seed=3)
    here = load_tiny_model(tmp_path)
    expected = train_here(here, N_STEPS)
    there = load_tiny_model(tmp_path)
    async with rolloutbus.up(
        model=tmp_path,
        workers=2,
        engine_options={"threads": 1},
        lease=PATIENT,
        host=STEADY_HOST,
    ) as fleet:
        found = await asyncio.to_thread(train_there, fleet.address, there, N_STEPS)

    np.testing.assert_allclose(
        [loss for loss, _ in found], [loss for loss, _ in expected], rtol=0, atol=SAME
    )
    assert [reward for _, reward in found] == [reward for _, reward in expected]
    assert any(abs(loss) > 1e-3 for loss, _ in expected), "nothing was learnt"
    for name, tensor in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name], tensor, rtol=0, atol=SAME)
