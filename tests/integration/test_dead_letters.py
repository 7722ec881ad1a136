"""A request that kills engines ends as poison, and is kept for people beside the logs."""

from pathlib import Path

import msgspec
import pytest

import rolloutbus
from rolloutbus import SamplingParams
from rolloutbus.errors import EngineFailed
from rolloutbus.launcher.plan import DEAD_LETTERS
from rolloutbus.launcher.settings import UpOptions
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

POISON = 666
WAIT_S = 5 * DEADLINE_S
"""Several engines die and are started again."""


def fleet_options(path: Path) -> UpOptions:
    return {
        "engine": "fake",
        "workers": 2,
        "engine_options": {"poison_token": POISON},
        "run_dir": path / "run",
        "keep_logs": True,
    }


async def poison(address: str) -> str:
    """Send a poisonous request; its rid, once it has ended as one."""
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    async with rolloutbus.connect(address) as client:
        with pytest.raises(EngineFailed) as caught:
            await client.generate([POISON, 1, 2], sampling, deadline_s=WAIT_S)
        assert caught.value.code == "poison"
        rollout = await client.generate([1, 2, 3], sampling, deadline_s=WAIT_S)
        assert len(rollout.tokens) == 4
    return caught.value.rid


def letter_in(path: Path) -> str:
    """rid of the only request kept; the file is its owner's only."""
    assert path.stat().st_mode & 0o777 == 0o600
    letter = msgspec.msgpack.decode(path.read_bytes())
    assert letter["body"]["prompt"][:4] == POISON.to_bytes(4, "little")
    return letter["rid"]


async def test_poison_is_kept_beside_the_logs_and_left_behind_with_them(tmp_path: Path) -> None:
    options = fleet_options(tmp_path)
    async with rolloutbus.up(**options) as fleet:
        rid = await poison(fleet.address)
    assert letter_in(tmp_path / "run" / "logs" / DEAD_LETTERS) == rid


async def test_poison_is_kept_where_the_operator_said(tmp_path: Path) -> None:
    path = tmp_path / "letters"
    options = fleet_options(tmp_path)
    options["dead_letters"] = path
    async with rolloutbus.up(**options) as fleet:
        rid = await poison(fleet.address)
    assert letter_in(path) == rid
