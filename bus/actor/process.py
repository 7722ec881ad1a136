"""One actor as a process: settings in as JSON, one ready line out, a clean end on a signal."""

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum, unique
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec
import uvloop

from rolloutbus.bus.actor.json_log import json_log_of
from rolloutbus.bus.actor.resources import WATCH_S, ResourceWatch, provide_fds
from rolloutbus.bus.actor.variables import PROGRESS, choice_of
from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.bus.wire.messages.membership import EXPLAINED
from rolloutbus.bus.wire.near_names import meant_field

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel send SIGTERM to this process when its parent dies.

    The parent is the thread that started this process: one that ends early counts as dead.

    Args:
        parent: process id that is expected to be the parent now; 0 does not look. (1 is a parent
            like any other: in a container, the launcher's.)
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have died before the call above: then nobody would ever tell.
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


COMPLAINT = "error: "
"""Begins the sentence with which a process says why it ends."""
_PREFIXES = {"error": COMPLAINT, "warning": "warning: "}
_LATE_LINES = 4
PARENT_VARIABLE = "ROLLOUTBUS_PARENT"
"""In the environment of a supervised process: the process id of its supervisor, which may have died
before the kernel was asked to tell."""
EXPECTED_PEERS = 1000
"""Connections that every actor must be able to hold; more are taken while the system allows."""


@unique
class ActorExit(IntEnum):
    """Exit status of an actor's process."""

    STOPPED = 0
    """It was told to leave."""
    FAILED = 1
    SETTINGS = 2
    """Its settings cannot work."""
    REPLACED = 3
    """A newer process has taken its name."""
    ENGINE = 4
    """Its engine cannot be built, or crashed too often."""
    FORBIDDEN = 5
    """Its key does not, or no longer, allow what it is."""
    REJECTED = 6
    """It is a second router: another one holds the fleet."""


class ActorSettings(Protocol):
    """Settings that every actor has."""

    @property
    def exit_with_parent(self) -> bool:
        """Leave when the process that started this one dies."""
        ...


SettingsT = TypeVar("SettingsT", bound=ActorSettings)


class _ReadyLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ready: dict[str, str]


class _NoticeLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    told: str


class _ProgressLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    doing: str


def announce_ready(**endpoints: str) -> None:
    """Report to this process's parent that it serves, and where: one JSON line on stdout."""
    sys.stdout.write(msgspec.json.encode(_ReadyLine(endpoints)).decode() + "\n")
    # Somebody waits for this line; and if the reader has died meanwhile, this raises.
    sys.stdout.flush()


def read_ready(line: bytes) -> dict[str, str] | None:
    """The endpoints of a ready line; None for anything else that a process may print."""
    try:
        return msgspec.json.decode(line, type=_ReadyLine).ready
    except msgspec.DecodeError:
        return None


def read_notice(line: bytes) -> str:
    """The sentence of `warn` or `complain` that a line holds; empty for anything else."""
    try:
        return msgspec.json.decode(line, type=_NoticeLine).told
    except msgspec.DecodeError:
        return ""


def read_progress(line: bytes) -> str:
    """What `tell_progress` has told in a line; empty for anything else."""
    try:
        return msgspec.json.decode(line, type=_ProgressLine).doing
    except msgspec.DecodeError:
        return ""


def tell_progress(doing: str) -> None:
    """Say what this process does until it is ready, e.g. `loading weights`."""
    with contextlib.suppress(OSError, ValueError):
        match choice_of(PROGRESS):
            case "supervisor":
                sys.stdout.write(msgspec.json.encode(_ProgressLine(doing)).decode() + "\n")
                sys.stdout.flush()
            case "terminal":
                sys.stderr.write(f"{doing} …\n")
                sys.stderr.flush()
            case _:
                pass


def complain(sentence: str) -> None:
    """Say why this process ends; see `complaint_in`."""
    _say("error", sentence)


def warn(sentence: str) -> None:
    """Say what people must know while this process goes on."""
    _say("warning", sentence)


def _say(level: Literal["warning", "error"], sentence: str) -> None:
    """Write to stderr, often a file on a disk that is full, and to the parent process."""
    text = f"{_PREFIXES[level]}{sentence}"
    try:
        log = json_log_of({"pid": os.getpid()})
    except SettingsError:  # perhaps the very thing that is complained of
        log = None
    if log is not None:
        log.write(level, "message", {"message": sentence})
    else:
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(msgspec.json.encode(_NoticeLine(text)).decode() + "\n")
        sys.stdout.flush()


def complaint_in(log: Sequence[str]) -> str:
    """The reason that a process gave for its end; empty if it gave none.

    What it leaves behind, such as the processes of an engine, may add a few lines.
    """
    reasons = [line for line in log[-_LATE_LINES:] if line.startswith(COMPLAINT)]
    return reasons[-1].removeprefix(COMPLAINT) if reasons else ""


def dismissed_exit(reason: str) -> ActorExit | None:
    """Exit status of a member whose hello the router refused, after saying why; None: it did not.

    `reason` is that of its `Stop`: the code, a colon and the message.
    """
    code, _, why = reason.partition(": ")
    if code not in EXPLAINED:
        return None
    complain(f"the router refuses it: {why}")
    return ActorExit.SETTINGS if code == "unreachable" else ActorExit.FAILED


def forbidden_exit(reason: str, what: str) -> ActorExit | None:
    """Exit status of a member whose key does not let it join, after saying why; None: it does.

    Args:
        reason: of its `Stop`: the code, and after a colon a sentence if the router gave none.
        what: the member, such as `worker`.
    """
    code, _, why = reason.partition(": ")
    if code != "forbidden":
        return None
    complain(why or f"the router does not let this key be this {what}")
    return ActorExit.FORBIDDEN


def on_stop_signal(
    stop: Callable[[], object], *, drain: Callable[[], object] | None = None
) -> None:
    """Have SIGTERM and SIGINT call `stop` on the running loop; SIGTERM `drain`, if there is one."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain or stop)
    loop.add_signal_handler(signal.SIGINT, stop)


def run_actor(
    name: str,
    settings_type: type[SettingsT],
    serve: Callable[[SettingsT], Awaitable[ActorExit]],
    arguments: Sequence[str] | None = None,
) -> ActorExit:
    """The whole `main` of an actor; returns its exit status.

    Args:
        name: as in `python -m NAME`.
        settings_type: what `--settings-json` or `--settings-file` holds.
        serve: runs the actor until a stop signal (see `on_stop_signal`); calls
            `announce_ready` as soon as others can count on it.
        arguments: of the command line; None: this process's own.
    """
    try:
        settings = _read_settings(name, settings_type, arguments)
        # Not for its own children, whose parent is another one.
        parent = int(os.environ.pop(PARENT_VARIABLE, "0"))
        if settings.exit_with_parent:
            die_with_parent(parent)
        provide_fds(EXPECTED_PEERS)
        return uvloop.run(_watched(serve(settings)))
    except (OSError, SettingsError) as error:
        complain(str(error))
        return ActorExit.SETTINGS
    except BusError as error:
        complain(str(error))
        return ActorExit.FAILED


def _read_settings(
    name: str, settings_type: type[SettingsT], arguments: Sequence[str] | None
) -> SettingsT:
    kind = settings_type.__name__
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--settings-json", metavar="JSON", help=f"a {kind} as a JSON object")
    source.add_argument("--settings-file", metavar="PATH", type=Path, help="a file that holds it")
    options = parser.parse_args(arguments)
    file: Path | None = options.settings_file
    try:
        text = options.settings_json if file is None else file.read_bytes()
        return msgspec.json.decode(text, type=settings_type)
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        meant = meant_field(error, settings_type)
        raise SettingsError(f"{file or '--settings-json'}: {error}{meant}") from error


async def _watched(serving: Awaitable[ActorExit]) -> ActorExit:
    """Serve, and say on stderr when a limit of the system comes near."""
    loop = asyncio.get_running_loop()
    watch = ResourceWatch()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        timer = loop.call_later(WATCH_S, look)
        for sentence in watch.look(loop.time()):
            warn(sentence)

    look()
    try:
        return await serving
    finally:
        if timer is not None:
            timer.cancel()
