"""`python -m rolloutbus.trainer_adapter.store --settings-json '{…}'`: one weight store process."""

import sys
from pathlib import Path

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.actor.process import (
    ActorExit,
    announce_ready,
    complain,
    dismissed_exit,
    forbidden_exit,
    on_stop_signal,
    run_actor,
    tell_progress,
)
from rolloutbus.bus.actor.resources import keep_freed_memory
from rolloutbus.bus.transport.endpoints import without_keys
from rolloutbus.trainer_adapter.store.actor import StoreActor
from rolloutbus.trainer_adapter.store.contents import StoreContents
from rolloutbus.trainer_adapter.store.settings import StoreSettings


async def serve(settings: StoreSettings) -> ActorExit:
    """Run a store until SIGTERM or SIGINT; its shared memory is given back at the end.

    After an error it is left to the next store, as if this one was killed.
    """
    keep_freed_memory()
    contents = StoreContents(Path(settings.directory), disk=settings.disk)
    try:
        actor = StoreActor(
            settings, contents, BootClock(), on_joined=lambda bulk: announce_ready(bulk=bulk)
        )
        on_stop_signal(actor.stop)
        tell_progress(f"joining the router at {without_keys(settings.router)}")
        reason = await actor.run()
    except BaseException:
        contents.leave()
        raise
    contents.close()
    if (refused := forbidden_exit(reason, "store")) is not None:
        return refused
    if reason == "other-fleet":
        complain("the router holds a fleet with another store's record; this one is not used")
        return ActorExit.FAILED
    if (refused := dismissed_exit(reason)) is not None:
        return refused
    if reason == "replaced":
        complain(f"another process has joined as {settings.name}; a fleet has one store")
        return ActorExit.REPLACED
    return ActorExit.STOPPED


if __name__ == "__main__":
    sys.exit(run_actor("rolloutbus.trainer_adapter.store", StoreSettings, serve))
