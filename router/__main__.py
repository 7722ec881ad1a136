"""`python -m router --settings-json '{…}'`: one router process."""

import secrets
import sys

from bus.process import ActorExit, announce_ready, complain, on_stop_signal, run_actor
from router.actor import RouterActor
from router.settings import RouterSettings


async def serve(settings: RouterSettings) -> ActorExit:
    """Route until SIGTERM or SIGINT."""
    router = RouterActor(settings, secrets.token_hex(16))
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


if __name__ == "__main__":
    sys.exit(run_actor("router", RouterSettings, serve))
