"""`python -m rolloutbus.engine_worker --settings-json '{…}'`: one worker process."""

import sys

from rolloutbus.bus.actor.process import (
    ActorExit,
    announce_ready,
    complain,
    dismissed_exit,
    forbidden_exit,
    on_stop_signal,
    run_actor,
    warn,
)
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.actor import WorkerActor


async def serve(settings: WorkerSettings) -> ActorExit:
    """Work until a stop signal, a `shutdown`, a newer process of this name, or a dead engine.

    SIGTERM lets what runs end first, for as long as `drain_s` says; SIGINT does not wait.
    """
    actor = WorkerActor(settings, on_joined=lambda stream: announce_ready(stream=stream))
    on_stop_signal(actor.stop, drain=actor.drain)
    reason = await actor.run()
    if settings.drain_s and reason == "shutdown" and actor.core.n_running:
        warn(f"{actor.core.n_running} requests had not ended; their clients go on elsewhere")
    if reason.startswith("engine_failed"):
        complain(reason)
        return ActorExit.ENGINE
    if (refused := forbidden_exit(reason, "worker")) is not None:
        return refused
    if reason == "other-fleet":
        complain(
            "the weights of this worker are of another fleet than the router's, whose versions are "
            "not these; a process that starts anew takes this fleet's"
        )
        return ActorExit.FAILED
    if (refused := dismissed_exit(reason)) is not None:
        return refused
    if reason == "replaced":
        complain(
            f"another process has joined as {settings.name}; each worker needs a name of its own"
        )
        return ActorExit.REPLACED
    return ActorExit.STOPPED


if __name__ == "__main__":
    sys.exit(run_actor("rolloutbus.engine_worker", WorkerSettings, serve))
