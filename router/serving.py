"""What a router's process does until it is told to leave."""

import secrets

from rolloutbus.bus.actor.process import ActorExit, announce_ready, complain, on_stop_signal
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.recording import TurnLog
from rolloutbus.router.settings import RouterSettings


async def serve(settings: RouterSettings, log: TurnLog | None = None) -> ActorExit:
    """Route until SIGTERM or SIGINT; `log` keeps every turn of the core."""
    router = RouterActor(settings, secrets.token_hex(16), log=log)
    on_stop_signal(router.stop)
    async with router:
        frontend, backend = router.endpoints
        tap = {"tap": router.tap} if router.tap else {}
        announce_ready(frontend=frontend, backend=backend, **tap)
        await router.stopped()
    problem = router.core.context.superseded
    if problem:
        complain(problem)
        return ActorExit.REJECTED
    return ActorExit.STOPPED
