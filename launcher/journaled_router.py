"""`python -m launcher.journaled_router --settings-json '{…}'`: a router that keeps its turns.

The router itself knows no journal: here the two are put together.
"""

import sys
from pathlib import Path

import msgspec

from bus.process import ActorExit, run_actor, warn
from launcher.version import installed_version
from replay.turns.writer import TurnWriter
from router.serving import serve
from router.settings import RouterSettings


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
    sys.exit(run_actor("launcher.journaled_router", JournaledRouterSettings, serve_journaled))
