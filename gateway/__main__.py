"""`python -m rolloutbus.gateway --settings-json '{…}'`: one gateway process."""

import asyncio
import gc
import sys
from contextlib import suppress

from rolloutbus.bus.actor.process import ActorExit, announce_ready, on_stop_signal, run_actor
from rolloutbus.bus.actor.resources import keep_what_is_loaded
from rolloutbus.gateway.server import run_gateway
from rolloutbus.gateway.settings import GatewaySettings

YOUNG_OBJECTS = 50_000
"""So many more objects than before start a collection. With Python's 700 all requests under way
are looked at again every few milliseconds, and hardly any object here is part of a cycle."""


async def serve(settings: GatewaySettings) -> ActorExit:
    """Run a gateway until SIGTERM or SIGINT."""
    running = asyncio.ensure_future(run_gateway(settings, _ready))
    on_stop_signal(running.cancel)
    with suppress(asyncio.CancelledError):
        await running
    return ActorExit.STOPPED


def _ready(url: str) -> None:
    """Tell the address."""
    keep_what_is_loaded()
    gc.set_threshold(YOUNG_OBJECTS)
    announce_ready(http=url)


if __name__ == "__main__":
    sys.exit(run_actor("rolloutbus.gateway", GatewaySettings, serve))
