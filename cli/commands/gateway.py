"""`rolloutbus gateway | metrics`: HTTP in front of a fleet, all of it or its metrics only."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.bus.actor.process import announce_ready
from rolloutbus.bus.transport.endpoints import without_keys
from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.cli.options import Address, OnlyJson, YourKey, example
from rolloutbus.cli.progress import waiting
from rolloutbus.cli.terminal import (
    ExitStatus,
    Unreachable,
    checked,
    client_settings,
    fail,
    run,
)
from rolloutbus.cli.verbs import Verbs
from rolloutbus.gateway.keys.http_keys import read_http_keys
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.launcher.discovery import model_of

RunGateway = Callable[[GatewaySettings, Callable[[str], None]], Awaitable[None]]

HttpKeys = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="API keys that HTTP clients must show, from `rolloutbus keys http`.",
    ),
]
Host = Annotated[str, typer.Option(help="A loopback address; any other needs --http-keys.")]

app = Verbs()


@app.command(epilog=example("rolloutbus gateway --tokenizer ./model --port 8000"))
def gateway(
    *,
    address: Address = "",
    key: YourKey = "",
    http_keys: HttpKeys = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the model, for text and chats. Default: the model of a fleet that "
            "runs here. Without one only /generate with token ids is served.",
        ),
    ] = None,
    served_model_name: Annotated[
        str, typer.Option(help="What requests call the model. Default: the directory's name.")
    ] = "",
    tool_format: Annotated[
        str,
        typer.Option(
            help="How the model writes tool calls; `none`: left in the content. Default: as its "
            "tokenizer says, or as is recognised from the chat template."
        ),
    ] = "",
    reasoning_format: Annotated[str, typer.Option(help="How it writes reasoning; the same.")] = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="For bodies of OpenAI's endpoints that do not say it.")
    ] = 1024,
    weights_root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of checkpoints that /update_weights_from_disk may publish.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    stall: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, help="A reader that takes nothing for so long is cut off."
        ),
    ] = 120.0,
    drain: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="Requests under way get so long to end after SIGTERM or Ctrl-C; then they answer "
            "what they have. A second signal does not wait.",
        ),
    ] = 5.0,
    quiet: OnlyJson = False,
) -> None:
    """Serve OpenAI's and SGLang's HTTP endpoints in front of a fleet, until Ctrl-C.

    Prints one JSON line with its address when it is ready: any OpenAI client takes it as
    `base_url`, with /v1 behind it.
    """
    run_gateway = _server()
    # An endpoint may be of any host: what lies here need not be that fleet's model.
    is_named = "://" not in address
    directory = tokenizer or (checked(lambda: model_of(address)) if is_named else None)
    router, bus_key = _bus_of(address, key, http_keys)
    settings = GatewaySettings(
        router=router,
        key_file=bus_key,
        http_keys=str(http_keys or ""),
        host=host,
        port=port,
        model_path=str(directory or ""),
        served_model_name=served_model_name,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        default_max_tokens=max_tokens,
        weights_root=str(weights_root.resolve()) if weights_root else "",
        stall_s=stall,
        drain_s=drain,
    )
    run(_serve(run_gateway, settings, quiet=quiet))


@app.command(epilog=example("rolloutbus metrics --port 9464"))
def metrics(
    *,
    address: Address = "",
    key: YourKey = "",
    http_keys: HttpKeys = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 9464,
    quiet: OnlyJson = False,
) -> None:
    """Serve a fleet's /metrics for Prometheus, and nothing else, until Ctrl-C.

    A gateway serves them, too: this is for fleets that have none.
    """
    run_gateway = _server()
    router, bus_key = _bus_of(address, key, http_keys)
    settings = GatewaySettings(
        router=router,
        key_file=bus_key,
        http_keys=str(http_keys or ""),
        host=host,
        port=port,
        only_metrics=True,
    )
    run(_serve(run_gateway, settings, quiet=quiet))


def _bus_of(address: str, key: str, http_keys: Path | None) -> tuple[str, str]:
    """Address of the router, and the file of the gateway's own key; empty: each API key has one."""
    held = checked(lambda: read_http_keys(http_keys)) if http_keys else []
    if held and key:
        fail("each API key names a key of the bus; leave --key out", ExitStatus.USAGE)
    client = checked(lambda: client_settings(address, held[0].key_file if held else key))
    return client.router, client.security.key_file if client.security and not held else ""


def _server() -> RunGateway:
    """What runs a gateway; ends the command if the extra is not installed."""
    try:  # usage and help come without it
        from rolloutbus.gateway.server import run_gateway  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rolloutbus"):
            raise
        fail(
            f"it needs the package {error.name}: pip install rolloutbus[gateway]", ExitStatus.USAGE
        )
    return run_gateway


async def _serve(run_gateway: RunGateway, settings: GatewaySettings, *, quiet: bool) -> None:
    router: str | None = without_keys(settings.router)

    def is_ready(url: str) -> None:
        nonlocal router
        router = None
        announce_ready(http=url)

    async with waiting(lambda: router and f"the router at {router}", quiet=quiet):
        try:
            await run_gateway(settings, is_ready)
        except PeerLost as error:
            raise Unreachable(str(error).partition(";")[0]) from error
