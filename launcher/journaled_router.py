"""A router that keeps its turns: `python -m rolloutbus.launcher.journaled_router --settings-json`.

The router itself knows no journal: here the two are put together.
"""

import sys
from pathlib import Path

import msgspec

from rolloutbus.bus.actor.process import ActorExit, run_actor, warn
from rolloutbus.launcher.version import installed_version
from rolloutbus.replay.turn_writer import TurnWriter
from rolloutbus.router.actor import serve
from rolloutbus.router.settings import RouterSettings


class JournaledRouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router, and the directory of its journal."""

    router: RouterSettings
    journal: str

    @property
    def exit_with_parent(self) -> bool:
        """As the router."""
        return self.router.exit_with_parent


async def serve_journaled(settings: JournaledRouterSettings) -> ActorExit:
    """Route until SIGTERM or SIGINT, and write down every turn."""
    writer = TurnWriter(Path(settings.journal), installed_version(), warn)
    async with writer:
        return await serve(settings.router, writer)


if __name__ == "__main__":
    sys.exit(
        run_actor("rolloutbus.launcher.journaled_router", JournaledRouterSettings, serve_journaled)
    )
