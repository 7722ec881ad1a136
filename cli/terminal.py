"""How a command ends: one line on stderr for what went wrong, and an exit status that says which.

0    done
1    failed: the command was understood, and could not be done
2    usage: an argument or a setting is wrong
3    unreachable: no router answers
130  Ctrl-C (`record` takes it as its end, and ends with 0)
143  SIGTERM (`up` and the actors take it as the order to stop, and end with 0)
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import IntEnum, unique
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import msgspec
import typer
import uvloop

from rolloutbus.bus.security.key_files import router_addresses_beside
from rolloutbus.bus.transport.endpoints import router_addresses, without_keys
from rolloutbus.bus.wire.errors import (
    BusError,
    PeerLost,
    ProcessFailed,
    Refused,
    SettingsError,
)
from rolloutbus.launcher.discovery import NoFleetRuns, NoSuchFleet, find_fleet

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.client.client import RolloutClient
    from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

CONNECT_TIMEOUT_S = 3.0
REFUSED_S = 1.0
"""How long a refused connection is tried again."""
REFUSED_LOOK_S = 0.1

T = TypeVar("T")


@unique
class ExitStatus(IntEnum):
    """What a command leaves behind for scripts."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130
    TERMINATED = 143


class Unreachable(BusError):
    """No router answers; nothing was asked."""

    default_outcome = "not_started"


def checked(build: Callable[[], T]) -> T:
    """What `build` makes; ends the program with one line if a setting is wrong."""
    try:
        return build()
    except (Unreachable, NoSuchFleet) as error:
        fail(str(error), ExitStatus.UNREACHABLE)
    except SettingsError as error:
        fail(str(error), ExitStatus.USAGE)


def run(
    work: Coroutine[Any, Any, T],
    *,
    terminated: ExitStatus = ExitStatus.TERMINATED,
    interrupted: ExitStatus = ExitStatus.INTERRUPTED,
) -> T:
    """Runs a command's work to its end; an error of rolloutbus ends the program with one line.

    Args:
        work: what to do; SIGINT, SIGTERM and SIGHUP cancel it, so that it can clean up.
        terminated: exit status after the latter two.
        interrupted: exit status after SIGINT, which is Ctrl-C.
    """
    try:
        return uvloop.run(_until_signal(work))
    except _StoppedError as stopped:
        is_interrupt = stopped.number == signal.SIGINT
        raise typer.Exit(interrupted if is_interrupt else terminated) from None
    except ProcessFailed as error:
        if error.log:
            sys.stderr.write(f"--- the last lines of {error.name}'s log\n{error.log}\n---\n")
        fail(str(error), ExitStatus.FAILED)
    except (Unreachable, NoSuchFleet) as error:
        fail(str(error), ExitStatus.UNREACHABLE)
    except SettingsError as error:
        fail(str(error), ExitStatus.USAGE)
    except BusError as error:
        is_usage = isinstance(error, Refused) and error.code == "bad_request"
        fail(str(error), ExitStatus.USAGE if is_usage else ExitStatus.FAILED)


def print_json(value: object, enc_hook: Callable[[Any], Any] | None = None) -> None:
    """One line on stdout."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=enc_hook).decode() + "\n")
    sys.stdout.flush()


def harmless(text: str) -> str:
    """Replaces control characters, so that a model's text cannot control the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def counted(n: int, what: str) -> str:
    """`1 client`, `2 clients`."""
    return f"{n} {what}{'s'[: n != 1]}"


def by_name(each: "_Named") -> tuple[int, str]:
    """A key for sorting: w10 comes after w9."""
    return len(each.name), each.name


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def fail(message: str, status: ExitStatus) -> NoReturn:
    """End the program with one line."""
    sys.stderr.write(f"error: {message}\n")
    raise typer.Exit(status)


def client_settings(address: str, key_file: str = "", name: str = "cli") -> "ClientSettings":
    """Settings of a client called `name`; a key gives it its own name.

    Args:
        address: an endpoint, or a fleet's name; empty: the one of `router.json` beside your key,
            or else the only fleet that runs here.
        key_file: your key; empty: the fleet's own one, if it is found by name.
        name: of the client.

    Raises:
        Unreachable: no such fleet runs here.
        SettingsError: several do, and none was named; or a key is missing or cannot be used.
    """
    from rolloutbus.trainer_adapter.client.client import settings_for  # noqa: PLC0415 - as in `connected`

    endpoint = address
    if not address and key_file:
        endpoint = address = router_addresses_beside(key_file).frontend
    if "://" not in address:
        if ":" in address:
            raise SettingsError(
                f"{address[:80]!r} is neither a fleet's name nor an endpoint: an endpoint begins "
                f"with its transport, e.g. tcp://{address[:80]}"
            )
        try:
            fleet = find_fleet(address)
        except NoSuchFleet as error:
            hint = ", or say --address" if isinstance(error, NoFleetRuns) else ""
            raise Unreachable(f"{error}{hint}") from error
        endpoint, key_file = fleet.address, key_file or fleet.key_file
    settings = settings_for(endpoint, "" if key_file else f"{name}-{os.getpid()}", key_file)
    return msgspec.structs.replace(settings, connect_timeout_s=CONNECT_TIMEOUT_S)


@asynccontextmanager
async def reached(service: "AbstractAsyncContextManager[T]") -> "AsyncGenerator[T]":
    """Enter what needs a router. Raises Unreachable: none answers there."""
    try:
        entered = await service.__aenter__()
    except PeerLost as error:
        raise Unreachable(str(error)) from error
    try:
        yield entered
    finally:
        await service.__aexit__(None, None, None)


@asynccontextmanager
async def connected(address: str, key_file: str = "") -> "AsyncGenerator[RolloutClient]":
    """A client of the router at `address`, which may be a fleet's name.

    Raises:
        Unreachable: no router answers there, or no such fleet runs here.
        SettingsError: as `client_settings`.
    """
    # Usage and help come without what only a client needs.
    from rolloutbus.trainer_adapter.client.client import RolloutClient  # noqa: PLC0415

    settings = client_settings(address, key_file)
    await _require_listener(router_addresses(without_keys(settings.router)))
    async with reached(RolloutClient(settings)) as client:
        yield client


async def _require_listener(routers: Sequence[str]) -> None:
    """Raises Unreachable at once if the kernel knows that nothing listens at any of these.

    A router that is being started again gets a moment. Anything else is for the client to find out.
    """
    until = time.monotonic() + REFUSED_S
    while True:
        refusals = [await _refusal_at(each) for each in routers]
        if not all(refusals):
            return
        if time.monotonic() > until:
            where = ", and ".join(
                f"at {each}: {why} there" for each, why in zip(routers, refusals, strict=True)
            )
            raise Unreachable(
                f"no router answers {where}; `rolloutbus ls` lists the fleets of this machine"
            )
        await asyncio.sleep(REFUSED_LOOK_S)


async def _refusal_at(endpoint: str) -> str:
    """Why nothing can be listening there; empty: something may be."""
    scheme, _, place = endpoint.partition("://")
    try:
        async with asyncio.timeout(REFUSED_S):
            if scheme == "ipc":
                _, writer = await asyncio.open_unix_connection(place)
            else:
                host, _, port = place.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), port)
        writer.close()
    except socket.gaierror as error:
        return error.strerror or "no such host"
    except (ConnectionRefusedError, FileNotFoundError):
        return "nothing listens"
    except (OSError, ValueError):
        return ""
    return ""


def ask(address: str, key_file: str, question: "Callable[[RolloutClient], Awaitable[T]]") -> T:
    """Run one question to a fleet to its answer; see `run` and `connected`."""

    async def asked() -> T:
        async with connected(address, key_file) as client:
            return await question(client)

    return run(asked())


async def until_ended(work: Coroutine[Any, Any, T], look: Callable[[], None], every_s: float) -> T:
    """What `work` returns; meanwhile look each `every_s` seconds."""
    ended = asyncio.ensure_future(work)
    try:
        while not ended.done():
            look()
            await asyncio.wait([ended], timeout=every_s)
        return ended.result()
    finally:
        ended.cancel()


class _StoppedError(Exception):
    """A signal came that orders us to stop."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


async def _until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Do the work; a signal cancels it, and a second one cancels its cleaning up."""
    task = asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if received:
            raise _StoppedError(received[0]) from None
        raise
