"""What a router is told at its start works, or is refused in a sentence."""

import socket
from pathlib import Path

import pytest

from rolloutbus import RolloutClient
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LOOPBACK_V6 = "tcp://[::1]:0"


def has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_v6(), reason="this machine has no IPv6 loopback")
async def test_a_router_on_the_loopback_of_ipv6_is_found_there() -> None:
    async with RouterActor(RouterSettings(LOOPBACK_V6, LOOPBACK_V6), "r") as router:
        address = router.endpoints[0]
        assert address.startswith("tcp://[::1]:")
        settings = ClientSettings("c", address, connect_timeout_s=DEADLINE_S)
        async with RolloutClient(settings) as client:
            assert (await client.status(deadline_s=DEADLINE_S)).n_clients == 1


async def test_dead_letters_that_cannot_be_written_are_refused_at_the_start(
    tmp_path: Path,
) -> None:
    at = f"ipc://{tmp_path}/"
    missing = tmp_path / "nowhere" / "letters.msgpack"
    settings = RouterSettings(f"{at}f", f"{at}b", dead_letters=str(missing))
    with pytest.raises(SettingsError, match=r"dead_letters: cannot write .*nowhere"):
        await RouterActor(settings, "r").__aenter__()
