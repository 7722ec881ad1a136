"""`python -m rolloutbus.replay --settings-json '{…}'`: a recorder as a process of a fleet."""

import asyncio
import os
import sys
from pathlib import Path

from rolloutbus.bus.actor.process import (
    ActorExit,
    announce_ready,
    on_stop_signal,
    run_actor,
    tell_progress,
    warn,
)
from rolloutbus.replay.recorder import Recorder
from rolloutbus.replay.settings import RecorderSettings
from rolloutbus.trainer_adapter.client.client import settings_for


async def serve(settings: RecorderSettings) -> ActorExit:
    """Record until a stop signal; what was heard until then is durable afterwards.

    A journal that cannot go on, such as on a full disk, ends the recording and not the fleet.
    """
    name = "" if settings.key_file else f"recorder-{os.getpid()}"
    client = settings_for(settings.router, name, settings.key_file)
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    tell_progress("joining the router")
    async with Recorder(client, Path(settings.directory)) as recorder:
        announce_ready(journal=settings.directory)
        tasks = [asyncio.ensure_future(each) for each in (recorder.stopped(), stop.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        problem = recorder.progress.problem
    if problem:
        warn(f"recording has ended: {problem}")
    return ActorExit.STOPPED


if __name__ == "__main__":
    sys.exit(run_actor("rolloutbus.replay", RecorderSettings, serve))
