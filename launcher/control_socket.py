"""A Unix socket in the run directory: other processes of this user have a fleet's workers changed.

One order a connection, as a line of JSON; lines come back that tell each step, and the last one how
it ended. Whoever closes the connection early takes the order back.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Self

import msgspec

from rolloutbus.bus.wire.errors import BusError, PeerLost, ProcessFailed, SettingsError

CONTROL = "control"
"""Name of the socket in a run directory."""
MAX_LINE_BYTES = 65_536


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="scale"):
    """Have so many workers."""

    workers: int
    drain_s: float


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="restart"):
    """Restart one worker."""

    worker: str
    drain_s: float


Order = Scale | Restart


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Something has happened to a process."""

    who: str
    what: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The order is carried out; these workers are to run now."""

    workers: list[str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The order was not carried out, or not wholly."""

    why: str
    is_refused: bool
    """Nothing was begun: the order asks for what cannot be."""


Reply = Step | Done | Failed
Tell = Callable[[str, str], None]
_reply_of = msgspec.json.Decoder(Reply).decode
_order_of = msgspec.json.Decoder(Order).decode


class ControlSocket:
    """The launcher's end. An async context manager: leaving it cancels what is under way."""

    def __init__(
        self, path: Path, carry_out: Callable[[Order, Tell], Awaitable[list[str]]]
    ) -> None:
        """Listen at nothing yet.

        Args:
            path: of the socket.
            carry_out: does what is asked for, tells each step, and returns the workers then.
        """
        self._path = path
        self._carry_out = carry_out
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        bound = socket.socket(socket.AF_UNIX)
        try:
            with _short(self._path) as short:
                bound.bind(short)
        except OSError:
            bound.close()
            raise
        self._server = await asyncio.start_unix_server(
            self._connected, sock=bound, limit=MAX_LINE_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # it has gone, or the fleet ends: either way nobody reads on
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(reply: Reply) -> None:
            # Who has gone is told nothing; to write all the same raises, in the middle of a change.
            if not writer.is_closing():
                writer.write(msgspec.json.encode(reply) + b"\n")

        try:
            order = _order_of(await reader.readline())
        except (msgspec.DecodeError, ValueError) as error:
            say(Failed(f"this is no order of this release: {error}", is_refused=True))
        else:
            work = self._carry_out(order, lambda who, what: say(Step(who, what)))
            if (end := await _unless_gone(work, reader)) is not None:
                say(end)
        await writer.drain()


async def _unless_gone(work: Awaitable[list[str]], reader: asyncio.StreamReader) -> Reply | None:
    """How the work ended; None if the other end closes first, which cancels it."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_closed(reader))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return Done(working.result()) if working.done() else None
    except ProcessFailed as error:
        log = f"; the last lines of its log:\n{error.log}" if error.log else ""
        return Failed(f"{error}{log}", is_refused=False)
    except BusError as error:
        return Failed(str(error), is_refused=isinstance(error, SettingsError))
    except OSError as error:  # of the launcher's own, such as a full disk
        return Failed(str(error), is_refused=False)
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({working})


async def _closed(reader: asyncio.StreamReader) -> None:
    """Wait until the other end closes; what more it says is not kept."""
    with contextlib.suppress(OSError):
        while await reader.read(MAX_LINE_BYTES):
            pass


async def ask(path: Path, order: Order) -> AsyncGenerator[Step | Done]:
    """Give a fleet an order; yields each step, and `Done` at last. Closing it takes the order back.

    Raises:
        SettingsError: it cannot be: nothing has changed.
        PeerLost: the launcher has gone; what it had begun is ended with its fleet.
        BusError: it was not carried out, or not wholly.
    """
    connecting = socket.socket(socket.AF_UNIX)
    connecting.settimeout(0.0)
    try:
        with _short(path) as short:
            await asyncio.get_running_loop().sock_connect(connecting, short)
    except OSError as error:
        connecting.close()
        raise PeerLost(f"nobody answers at {path}: {error.strerror}") from error
    reader, writer = await asyncio.open_unix_connection(sock=connecting, limit=MAX_LINE_BYTES)
    try:
        writer.write(msgspec.json.encode(order) + b"\n")
        async for reply in _replies(reader):
            match reply:
                case Failed(why, is_refused):
                    raise SettingsError(why) if is_refused else BusError(why)
                case _:
                    yield reply
            if isinstance(reply, Done):
                return
        raise PeerLost("the launcher has gone, and its fleet with it")
    finally:
        writer.close()


async def _replies(reader: asyncio.StreamReader) -> AsyncGenerator[Reply]:
    with contextlib.suppress(ConnectionError):
        # A line without an end is a part of one: who wrote it has gone.
        while (line := await reader.readline()).endswith(b"\n"):
            yield _reply_of(line)


@contextlib.contextmanager
def _short(path: Path) -> Generator[str]:
    """A short name of a path while its directory is open: sockets' names have 107 bytes at most."""
    directory = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
