"""`python -m tests.drills.chaos.clients --settings-file FILE`: one process of clients.

SIGTERM ends the asking; the process leaves when every answer is here.
"""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.actor.process import ActorExit, announce_ready, on_stop_signal, run_actor
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.drills.chaos.load import Lane, collect
from tests.drills.chaos.records import HistoryWriter
from tests.drills.chaos.settings import LoadSettings


async def serve(settings: LoadSettings) -> ActorExit:
    """Keep requests open until a stop signal, then wait for the last answers."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    clock = BootClock()
    async with AsyncExitStack() as stack:
        history = stack.enter_context(HistoryWriter(Path(settings.history)))
        # The router may be away just now, for as long as its start takes.
        patience_s = settings.deadline_s
        clients = {
            name: await stack.enter_async_context(
                RolloutClient(ClientSettings(name, endpoint, connect_timeout_s=patience_s))
            )
            for name, endpoint in settings.endpoints.items()
        }
        announce_ready()
        async with asyncio.TaskGroup() as lanes:
            for name, client in clients.items():
                if settings.life and settings.detached_share:
                    inherited = collect(client, name, settings, history, clock)
                    lanes.create_task(inherited)
                for number in range(settings.lanes[name]):
                    lane = Lane(client, settings, history, clock)
                    lanes.create_task(lane.run(f"{name}:{settings.life}.{number}", stop))
    return ActorExit.STOPPED


if __name__ == "__main__":
    sys.exit(run_actor("tests.drills.chaos.clients", LoadSettings, serve))
