"""`rolloutbus gateway`: HTTP in front of a fleet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.bus.actor.process import announce_ready
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.options import Address, YourKey, example
from rolloutbus.cli.terminal import checked, client_settings, reached, run
from rolloutbus.launcher.discovery import NoSuchFleet, find_fleet

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Job:
    """What to serve."""

    directory: Path | None
    """Of the model's tokenizer."""
    name: str
    tool_format: str
    max_tokens: int


@app.command(epilog=example("rolloutbus gateway --tokenizer ./model --port 8000"))
def gateway(
    *,
    address: Address = "",
    key: YourKey = "",
    host: Annotated[str, typer.Option(help="A loopback address.")] = "127.0.0.1",
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
        typer.Option(help="How the model writes tool calls; `none`: left in the content."),
    ] = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="For bodies of OpenAI's endpoints that do not say it.")
    ] = 1024,
) -> None:
    """Serve OpenAI's and SGLang's HTTP endpoints in front of a fleet, until Ctrl-C.

    Prints one JSON line with its address when it is ready: any OpenAI client takes it as
    `base_url`, with /v1 behind it.
    """
    directory = tokenizer or checked(lambda: _model_of(address))
    name = served_model_name or (directory.name if directory is not None else "default")
    job = Job(directory, name, tool_format, max_tokens)
    run(_gateway(address, key, host, port, job))


def _model_of(address: str) -> Path | None:
    """The directory of the model that a fleet of this machine was brought up with."""
    if "://" in address:
        return None
    try:
        model = find_fleet(address).model
    except NoSuchFleet:
        return None  # connecting says it
    directory = Path(model)
    return directory if model and directory.is_dir() else None


async def _gateway(address: str, key: str, host: str, port: int, job: Job) -> None:
    # Usage and help come without what only a gateway needs.
    try:
        from rolloutbus.gateway.app import gateway_app  # noqa: PLC0415
        from rolloutbus.gateway.server import (  # noqa: PLC0415
            address_of,
            chat_tokenizer,
            listening_socket,
            serve,
        )
        from rolloutbus.gateway.settings import GatewaySettings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rolloutbus"):
            raise
        raise SettingsError(
            f"the gateway needs the package {error.name}: pip install rolloutbus[gateway]"
        ) from None
    from rolloutbus.trainer_adapter.client.client import RolloutClient  # noqa: PLC0415

    settings = GatewaySettings(
        served_model_name=job.name,
        model_path=str(job.directory or ""),
        tool_format=job.tool_format,
        default_max_tokens=job.max_tokens,
    )
    tokenizer = chat_tokenizer(job.directory) if job.directory is not None else None
    bound = listening_socket(host, port)
    async with reached(RolloutClient(client_settings(address, key, "gateway"))) as client:
        app = gateway_app(client, settings, tokenizer)
        await serve(app, bound, lambda: announce_ready(http=address_of(bound)))
