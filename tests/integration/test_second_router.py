"""A second router on the addresses of a living one."""

from pathlib import Path

import pytest

from bus.errors import SettingsError
from router.actor import RouterActor
from router.settings import RouterSettings


async def test_a_second_router_does_not_take_the_ipc_path_of_the_first(tmp_path: Path) -> None:
    settings = RouterSettings(f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/back")
    async with RouterActor(settings, "first"):
        with pytest.raises(SettingsError, match="front: Address already in use"):
            await RouterActor(settings, "second").__aenter__()
