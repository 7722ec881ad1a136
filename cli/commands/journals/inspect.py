"""`rolloutbus inspect`: a frame, a segment of a journal or dead letters as JSON."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rolloutbus.cli.options import example
from rolloutbus.cli.terminal import ExitStatus, fail
from rolloutbus.cli.verbs import Verbs
from rolloutbus.replay.inspection import inspect as values_of
from rolloutbus.replay.journal.format import JournalError

app = Verbs()


@app.command(epilog=example("rolloutbus inspect ./journal/000001.rbz"))
def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help="A segment (.rbj, .rbz), dead_letters.msgpack of a fleet, or one frame."
        ),
    ],
    *,
    shows_all: Annotated[
        bool, typer.Option("--full", help="All bytes of binary values, not only the first 32.")
    ] = False,
) -> None:
    """Print what a file holds, one JSON value a line; for people and other programs.

    It is read by a plain MessagePack library: also what this version of the program would not take.
    Prompts are private: who may read the file may read them.
    """
    if file.is_dir():
        fail(f"{file} is a directory: name one of its files", ExitStatus.USAGE)
    try:
        for value in values_of(file, shows_all=shows_all):
            sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except JournalError as error:
        sys.stdout.flush()
        fail(f"{file}: {error}", ExitStatus.FAILED)
    except OSError as error:
        fail(f"{file}: {error.strerror}", ExitStatus.FAILED)
