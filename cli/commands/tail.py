"""`rolloutbus tail`: what a fleet samples, as it samples it."""

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.cli.options import Address, AsJson, YourKey, example
from rolloutbus.cli.stream_texts import StreamTexts, ids_of
from rolloutbus.cli.terminal import Unreachable, checked, client_settings, run
from rolloutbus.replay.recording.choice import Filter
from rolloutbus.replay.stream.events import StreamEvent
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.text import TokenizerFile, load_tokenizer

REDRAW_S = 0.1
MAX_LINES = 24
"""Streams that are shown at once; the latest."""

app = typer.Typer()


@app.command(epilog=example("rolloutbus tail --client trainer --tokenizer ./model"))
def tail(
    *,
    client: Annotated[
        list[str] | None, typer.Option("--client", help="Of this client; may be repeated.")
    ] = None,
    session: Annotated[
        list[str] | None,
        typer.Option("--session", help="Of this session; the router needs a tap (`up --tap`)."),
    ] = None,
    rid: Annotated[list[str] | None, typer.Option("--rid", help="This request.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or the model directory with it.")
    ] = None,
    via: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Of a forwarder, instead of the workers.")
    ] = "",
    address: Address = "",
    key: YourKey = "",
    as_json: AsJson = False,
) -> None:
    """Show streams as they are sampled, until Ctrl-C: text with --tokenizer, otherwise token ids.

    Nobody waits for who watches. If this terminal or script is too slow, only results are shown
    until it has caught up, and that is said. With --json each event is a line. A key of role
    `client` sees the streams of its own names, which must be given as --client.
    """
    loaded = checked(partial(load_tokenizer, tokenizer)) if tokenizer else None
    wanted = Filter(client=client or [], session=session or [])

    def subscriber() -> Subscriber:
        settings = client_settings(address, key, "tail")
        return Subscriber(settings, wanted, rids=rid or [], via=via)

    try:
        run(_tail(subscriber, loaded, as_json=as_json))
    except BrokenPipeError:
        # Who read this has seen enough; what is left in the buffer must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _tail(
    make: Callable[[], Subscriber], tokenizer: TokenizerFile | None, *, as_json: bool
) -> None:
    subscriber = make()
    try:
        await subscriber.__aenter__()
    except PeerLost as error:
        raise Unreachable(str(error)) from error
    try:
        decode = partial(tokenizer.decode, skip_special_tokens=False) if tokenizer else ids_of
        if as_json:
            await _print_json(subscriber, tokenizer)
        elif sys.stdout.isatty():
            await _show(subscriber, StreamTexts(decode))
        else:
            await _print_endings(subscriber, StreamTexts(decode))
    finally:
        await subscriber.__aexit__(None, None, None)


async def _print_json(subscriber: Subscriber, tokenizer: TokenizerFile | None) -> None:
    async for event in subscriber:
        line = as_line(event)
        if tokenizer is not None and "tokens" in line:
            line["text"] = tokenizer.decode(line["tokens"].tolist(), skip_special_tokens=False)
        sys.stdout.write(msgspec.json.encode(line, enc_hook=_listed).decode() + "\n")
        sys.stdout.flush()


async def _print_endings(subscriber: Subscriber, texts: StreamTexts) -> None:
    note = ""
    async for event in subscriber:
        said = texts.heard(event)
        if said:
            sys.stdout.write(f"{said}\n")
            sys.stdout.flush()
        if texts.note != note:
            note = texts.note
            sys.stderr.write(f"{note or 'caught up'}\n")


async def _show(subscriber: Subscriber, texts: StreamTexts) -> None:
    """Open streams at the foot of the terminal, ended ones above."""
    console = Console()
    loop = asyncio.get_running_loop()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        drawn_at = 0.0
        timer: asyncio.TimerHandle | None = None

        def draw() -> None:
            nonlocal timer, drawn_at
            timer, drawn_at = None, loop.time()
            live.update(drawn(texts, console.width), refresh=True)

        draw()
        async for event in subscriber:
            said = texts.heard(event)
            if said:
                head, _, body = said.partition("\n")
                console.print(Text(head, "bold"), Text(body), sep="\n")
            if timer is None:
                timer = loop.call_at(drawn_at + REDRAW_S, draw)
        if timer is not None:
            timer.cancel()


def drawn(texts: StreamTexts, width: int) -> Group:
    """One line for each of the latest open streams, and one about all."""
    lines: list[Text] = []
    for stream in list(texts.open.values())[-MAX_LINES:]:
        head = f"{stream.rid} {stream.worker} v{stream.version} {len(stream.tokens):>5} "
        room = max(8, width - len(head) - 1)
        said = texts.end_of(stream, room)
        lines.append(Text.assemble((head, "dim"), said, no_wrap=True, overflow="crop"))
    foot = f"{texts.n_workers} workers | {len(texts.open)} open streams"
    lines.append(Text(f"{foot} | {texts.note}" if texts.note else foot, "yellow dim"))
    return Group(*lines)


def as_line(event: StreamEvent) -> dict[str, Any]:
    """An event for scripts: its name in small letters, and its fields."""
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(event).__name__)
    return {"event": name[1:], **{field: getattr(event, field) for field in event.__slots__}}


def _listed(value: object) -> list[Any]:
    assert isinstance(value, np.ndarray)
    return value.tolist()
