"""Weights that overflow end requests, on the transformers engine as on others."""

from pathlib import Path

import pytest

from rolloutbus import RolloutClient
from rolloutbus.launcher.settings import UpOptions
from tests.integration.conftest import REAL_ENGINES
from tests.integration.overflowing_weights import HURT, check_overflow
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {**REAL_ENGINES, "workers": 1}


@pytest.mark.shows("weights that overflow")
@pytest.mark.parametrize("hurt", HURT)
async def test_requests_of_overflowing_weights_fail_and_the_engine_lives(
    client: RolloutClient, tiny_model: Path, hurt: str
) -> None:
    await check_overflow(client, dict(Reference(tiny_model).model.named_parameters()), hurt)
