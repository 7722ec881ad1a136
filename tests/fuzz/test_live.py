"""A small siege of a live fleet; the large one is `python tests/fuzz/live.py`."""

from pathlib import Path

import pytest

from tests.fuzz.live import besiege, is_unharmed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.mark.parametrize("is_guarded", [False, True], ids=["without keys", "with keys"])
async def test_a_fleet_under_attack_serves_its_client_and_loses_nothing(
    seed: int, tmp_path: Path, is_guarded: bool
) -> None:
    found = await besiege(2000, 2000, seed, tmp_path / "keys" if is_guarded else None)
    assert is_unharmed(found), str(found)
    assert found["counters"]["malformed"] > 0, "nothing hostile got as far as the router"
