"""`python -m rolloutbus.gateway --settings-json '{…}'`: one gateway process."""

import asyncio
import sys
from contextlib import suppress

from rolloutbus.bus.actor.process import ActorExit, announce_ready, on_stop_signal, run_actor
from rolloutbus.gateway.server import run_gateway
from rolloutbus.gateway.settings import GatewaySettings


async def serve(settings: GatewaySettings) -> ActorExit:
    """Run a gateway until SIGTERM or SIGINT."""
    running = asyncio.ensure_future(run_gateway(settings, lambda url: announce_ready(http=url)))
    on_stop_signal(running.cancel)
    with suppress(asyncio.CancelledError):
        await running
    return ActorExit.STOPPED


if __name__ == "__main__":
    sys.exit(run_actor("rolloutbus.gateway", GatewaySettings, serve))
