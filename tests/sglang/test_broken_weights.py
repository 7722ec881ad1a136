"""Weights that overflow end requests with the reason; SGLang's processes go on."""

from pathlib import Path

import pytest

from rolloutbus import Fleet, RolloutClient
from tests.integration.overflowing_weights import HURT, check_overflow
from tests.integration.reference import Reference
from tests.sglang.processes import scheduler_pids

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.shows("weights that overflow")
@pytest.mark.parametrize("hurt", HURT)
async def test_requests_of_overflowing_weights_fail_and_the_engine_lives(
    fleet: Fleet, client: RolloutClient, llama: Path, hurt: str
) -> None:
    before = scheduler_pids(fleet)

    await check_overflow(client, dict(Reference(llama).model.named_parameters()), hurt)

    assert scheduler_pids(fleet) == before
