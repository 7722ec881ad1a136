"""`rolloutbus forward`: the streams of a fleet at one address."""

import sys
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from rolloutbus.bus.actor.process import announce_ready
from rolloutbus.bus.transport.endpoints import without_keys
from rolloutbus.bus.transport.zmq_topics import MAX_UNREAD
from rolloutbus.cli.options import Address, AllowFile, OnlyJson, YourKey, example
from rolloutbus.cli.progress import waiting
from rolloutbus.cli.terminal import ExitStatus, client_settings, reached, run, until_ended
from rolloutbus.cli.verbs import Verbs
from rolloutbus.replay.forwarder import Forwarder

LOOK_S = 1.0

app = Verbs()


@app.command(epilog=example("rolloutbus forward --bind tcp://127.0.0.1:7790"))
def forward(
    *,
    bind: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Where readers connect. Port 0: a free one.")
    ] = "tcp://127.0.0.1:7790",
    address: Address = "",
    key: YourKey = "",
    allow_list: AllowFile = "",
    quiet: OnlyJson = False,
) -> None:
    """Publish the streams of all workers at one address, until Ctrl-C.

    For readers who cannot reach every worker: `tail --via`, `rolloutbus.subscribe(via=…)`. Beyond
    this machine it needs the key of a subscriber, and the workers' allow-list: nobody reads here
    what they may not read there. Prints one JSON line with its endpoint when it is ready.
    """
    run(_forward(bind, address, key, allow_list, quiet=quiet), terminated=ExitStatus.OK)


async def _forward(bind: str, address: str, key: str, allow_list: str, *, quiet: bool) -> None:
    was_behind = False

    def look() -> None:
        """Say when it falls behind."""
        nonlocal was_behind
        is_behind = forwarder.counters.streak_in >= MAX_UNREAD // 2
        if is_behind and not was_behind:
            sys.stderr.write("warning: it reads too slowly: what it misses, all here miss\n")
        was_behind = is_behind

    settings = client_settings(address, key, "forwarder")
    async with AsyncExitStack() as stack:
        async with waiting(lambda: f"the router at {without_keys(settings.router)}", quiet=quiet):
            service = reached(Forwarder(settings, bind, allow_list))
            forwarder = await stack.enter_async_context(service)
        announce_ready(stream=forwarder.endpoint)
        await until_ended(forwarder.stopped(), look, LOOK_S)
