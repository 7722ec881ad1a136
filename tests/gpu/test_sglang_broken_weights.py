"""Weights that overflow on a GPU: an assertion in a kernel would end the process for good."""

import pytest

from tests.gpu.gpu_fleets import gpu_fleet, running
from tests.gpu.tiny import load_tiny, save_tiny
from tests.integration.overflowing_weights import HURT, check_overflow

N_ENDLESS = 3500
"""Nearly the context."""


@pytest.mark.shows("weights that overflow")
async def test_requests_of_overflowing_weights_fail_and_the_engine_lives(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    sound = {name: each.bfloat16() for name, each in load_tiny(path).named_parameters()}
    async with running(gpu_fleet(path)) as client:
        for hurt in HURT:
            await check_overflow(client, sound, hurt, n_endless=N_ENDLESS)
