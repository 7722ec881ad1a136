"""`rolloutbus tail`: prints the tokens of a fleet while they are sampled."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rolloutbus.cli.options import Address, AsJson, YourKey, example
from rolloutbus.cli.terminal import checked, client_settings, harmless, print_json, reached, run
from rolloutbus.cli.verbs import Verbs
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.stream.events import (
    Demoted,
    Finished,
    GapLost,
    LetGo,
    Restored,
    StreamEvent,
    Tokens,
    WorkerJoined,
    WorkerLeft,
)
from rolloutbus.replay.subscriber import Subscriber
from rolloutbus.trainer_adapter.client.text import TokenizerFile, load_tokenizer

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


def ids_of(tokens: Sequence[int]) -> str:
    """Token ids as text, e.g. `3,17,4`, when there is no tokenizer."""
    return ",".join(map(str, tokens))


@dataclass(slots=True)
class OpenText:
    """A stream that has not ended."""

    rid: str
    worker: str = ""
    version: int = 0
    n_lost: int = 0
    tokens: list[int] = field(default_factory=list[int])
    """Those that came; what was lost is left out."""


class StreamTexts:
    """All open streams, in the order in which they began, and what is to be said of ended ones."""

    def __init__(self, decode: Decode = ids_of) -> None:
        self._decode = decode
        self.open: dict[str, OpenText] = {}
        self.note = ""
        """How well the reader keeps up; empty: all is told."""
        self.n_workers = 0

    def end_of(self, stream: OpenText, n_chars: int) -> str:
        """The last of what it says so far, on one line."""
        # A token is a character at least, nearly always.
        return " ".join(self._said(stream.tokens[-n_chars:]).split())[-n_chars:]

    def heard(self, event: StreamEvent) -> str:
        """Take an event in; returns what to say of a stream that has ended, or nothing."""
        match event:
            case Tokens():
                self._told(event)
            case Finished():
                self.open.pop(event.rid, None)
                return self._ending(event)
            case GapLost():
                stream = self._stream(event.rid)
                stream.n_lost += event.stop - event.start
            case Demoted(cause):
                slow = "this reader" if cause == "reader" else "this process"
                self.note = f"{slow} is too slow: only results are shown"
            case Restored():
                self.note = ""
            case LetGo(n_streams, _):
                self.open.clear()
                return f"({n_streams} streams were dropped: there was no room for them)"
            case WorkerJoined():
                self.n_workers += 1
            case WorkerLeft():
                self.n_workers -= 1
            case _:
                pass
        return ""

    def _stream(self, rid: str) -> OpenText:
        stream = self.open.get(rid)
        if stream is None:
            stream = self.open[rid] = OpenText(rid)
        return stream

    def _told(self, event: Tokens) -> None:
        stream = self._stream(event.rid)
        stream.worker, stream.version = event.worker, event.version
        del stream.tokens[max(0, event.start - stream.n_lost) :]
        stream.tokens += event.tokens.tolist()

    def _ending(self, event: Finished) -> str:
        versions = "+".join(f"v{version}" for version, _ in event.version_runs) or "v?"
        facts = [event.worker, versions, f"{len(event.tokens)} tokens"]
        if event.n_missing:
            facts.append(f"{event.n_missing} lost")
        facts.append(event.finish_reason or "end not heard")
        return f"{event.rid} ({', '.join(facts)})\n{self._said(event.tokens.tolist())}"

    def _said(self, tokens: Sequence[int]) -> str:
        return harmless(self._decode(tokens))


REDRAW_S = 0.1
MAX_LINES = 24
"""Streams that are shown at once; the latest."""

app = Verbs()


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
    async with reached(make()) as subscriber:
        decode = partial(tokenizer.decode, skip_special_tokens=False) if tokenizer else ids_of
        if as_json:
            await _print_json(subscriber, tokenizer)
        elif sys.stdout.isatty():
            await _show(subscriber, StreamTexts(decode))
        else:
            await _print_endings(subscriber, StreamTexts(decode))


async def _print_json(subscriber: Subscriber, tokenizer: TokenizerFile | None) -> None:
    async for event in subscriber:
        line = as_line(event)
        if tokenizer is not None and "tokens" in line:
            line["text"] = tokenizer.decode(line["tokens"].tolist(), skip_special_tokens=False)
        print_json(line, listed)


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
    return {"event": name[1:], **{each.name: getattr(event, each.name) for each in fields(event)}}


def listed(value: object) -> list[Any]:
    """An array for JSON."""
    assert isinstance(value, np.ndarray)
    return value.tolist()
