"""`rolloutbus record`: a fleet's streams and commands, written down as they happen."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rolloutbus.cli.options import Address, AsJson, YourKey, example
from rolloutbus.cli.terminal import (
    ExitStatus,
    checked,
    client_settings,
    fail,
    print_json,
    reached,
    run,
    until_ended,
)
from rolloutbus.cli.verbs import Verbs
from rolloutbus.replay.choice import Filter, filter_in
from rolloutbus.replay.journal.core import MIB, JournalSettings
from rolloutbus.replay.recorder import Progress, Recorder
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

PROGRESS_EVERY_S = 1.0

app = Verbs()


@app.command(epilog=example("rolloutbus record ./journal --filter session=s1,policy=actor"))
def record(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A directory; the journal that is there goes on."),
    ],
    *,
    wanted: Annotated[
        str,
        typer.Option(
            "--filter",
            metavar="NAME=VALUE,…",
            help="Only requests of this client, session or policy; of one name twice, either.",
        ),
    ] = "",
    address: Address = "",
    key: YourKey = "",
    segment_mib: Annotated[int, typer.Option(metavar="MIB", min=1, help="Size of one file.")] = 64,
    segment_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Age of one file.")
    ] = 600.0,
    keep_mib: Annotated[
        int,
        typer.Option(metavar="MIB", min=0, help="Delete the oldest files beyond; 0: keep all."),
    ] = 0,
    keep_s: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Delete files older than that; 0: keep all."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Record what a fleet says, until Ctrl-C.

    That is every token and, if its router has a tap (`up --tap`), every command and reply. The
    journal is for its owner only: it holds prompts and results in the clear.
    """
    chosen = checked(partial(filter_in, wanted))
    settings = checked(
        lambda: JournalSettings(
            segment_bytes=segment_mib * MIB,
            segment_s=segment_s,
            keep_bytes=keep_mib * MIB,
            keep_s=keep_s,
        )
    )
    client = checked(lambda: client_settings(address, key, "recorder"))
    work = _record(client, out.absolute(), chosen, settings, as_json=as_json)
    problem = run(work, terminated=ExitStatus.OK, interrupted=ExitStatus.OK)
    fail(f"recording has ended: {problem}", ExitStatus.FAILED)


async def _record(
    client: ClientSettings, out: Path, wanted: Filter, settings: JournalSettings, *, as_json: bool
) -> str:
    """Until something ends it; returns what."""
    recorder = Recorder(client, out, wanted, settings)

    def show() -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line_of(recorder.progress)}")
            sys.stderr.flush()

    has_begun = False
    try:
        async with reached(recorder):
            has_begun = True
            streams_only = "" if recorder.has_tap else ": streams only, the router has no tap"
            sys.stderr.write(f"recording to {out}{streams_only}\n")
            sys.stderr.flush()
            return await until_ended(recorder.stopped(), show, PROGRESS_EVERY_S)
    finally:
        if has_begun:
            told = recorder.progress
            sys.stderr.write(f"\n{line_of(told)}\n")
            if as_json:
                print_json(told._asdict())


def line_of(told: Progress) -> str:
    """`1,204 records, durable to 1,204 | tap 800, streams 404 messages | nothing lost`."""
    heard = told.heard
    losses = {
        "messages of the tap": heard.lost_tap,
        "tokens": heard.lost_tokens,
        "messages for want of room": told.n_dropped,
        "malformed messages": heard.malformed,
    }
    lost = ", ".join(f"{n:,} {what}" for what, n in losses.items() if n)
    return (
        f"{told.n_records:,} records, durable to {told.durable:,} | tap {heard.tap:,}, "
        f"streams {heard.stream:,} messages | {f'lost: {lost}' if lost else 'nothing lost'}"
    )
