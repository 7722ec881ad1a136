"""`python -m router --settings-json '{…}'`: one router process."""

import asyncio
import secrets
import sys

from bus.process import ActorExit, announce_ready, on_stop_signal, run_actor
from router.actor import RouterActor
from router.settings import RouterSettings


async def serve(settings: RouterSettings) -> ActorExit:
    """Route until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    async with RouterActor(settings, secrets.token_hex(16)) as router:
        frontend, backend = router.endpoints
        announce_ready(frontend=frontend, backend=backend)
        await router.run_until(stop)
    return ActorExit.STOPPED


if __name__ == "__main__":
    sys.exit(run_actor("router", RouterSettings, serve))
