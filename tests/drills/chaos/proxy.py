"""A TCP proxy that can break a link the way networks do, each direction by itself.

A cut holds bytes back and hides ends of connections, as a lost route does: what was sent meanwhile
arrives when it heals, because TCP sends again. Nothing here knows what the bytes mean.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Literal, Self

Direction = Literal["up", "down"]
"""`up`: from whoever connects to where it wants to go; `down`: back."""

BOTH: tuple[Direction, ...] = ("up", "down")
CHUNK_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ProxyLink:
    """One listening port in front of one address; an async context manager.

    The port is open from the start, so that its endpoint can be handed out; connections wait in
    the kernel until the link is entered.
    """

    def __init__(self, upstream: str = "") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1_024)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        """Where to connect instead of at `upstream`."""
        self.upstream = upstream
        """`tcp://host:port`; connections made from now on go there."""
        self.delay_s: dict[Direction, float] = dict.fromkeys(BOTH, 0.0)
        """How long each chunk is held; latency, and so less throughput."""
        self.carried_bytes: dict[Direction, int] = dict.fromkeys(BOTH, 0)
        """What has passed."""
        self.tamper: Callable[[Direction, bytes], bytes] | None = None
        """Changes bytes on their way."""
        self._gates: dict[Direction, asyncio.Event] = {each: asyncio.Event() for each in BOTH}
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.heal()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, sock=self._listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def n_connections(self) -> int:
        """Connections through it now, those included that one side has left during a cut."""
        return len(self._pairs)

    def cut(self, *directions: Direction) -> None:
        """Let nothing pass, no FIN and no RST either; no direction named: both."""
        for direction in directions or BOTH:
            self._gates[direction].clear()

    def heal(self) -> None:
        """Let everything pass again: held bytes first, then ends that were hidden."""
        for gate in self._gates.values():
            gate.set()

    def halve(self) -> None:
        """Half-open: the far side sees a reset, the near side nothing at all until it heals."""
        self.cut()
        for pair in self._pairs:
            pair.abort_far()

    def reset(self) -> None:
        """Both sides of all connections see a reset."""
        for pair in list(self._pairs):
            pair.abort()

    async def _accepted(
        self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(near_in, near_out)
        except (OSError, asyncio.CancelledError):
            # A broken connection is what this is for; and a cancelled task here is our own end.
            near_out.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _serve(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        # While it is cut, a connection attempt gets no further than this process.
        await self._gates["up"].wait()
        if not self.upstream:
            # A stranger, who looks for whoever had this port before.
            raise ConnectionRefusedError
        host, _, port = self.upstream.removeprefix("tcp://").rpartition(":")
        far_in, far_out = await asyncio.open_connection(host, int(port))
        pair = _Pair(near_out, far_out)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump("up", near_in, far_out))
                pumps.create_task(self._pump("down", far_in, near_out))
        finally:
            self._pairs.discard(pair)
            pair.abort()

    async def _pump(
        self, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        gate = self._gates[direction]
        # uvloop says RuntimeError where a transport was aborted meanwhile.
        with contextlib.suppress(OSError, RuntimeError):
            while data := await source.read(CHUNK_BYTES):
                if delay_s := self.delay_s[direction]:
                    await asyncio.sleep(delay_s)
                await gate.wait()
                self.carried_bytes[direction] += len(data)
                sink.write(data if self.tamper is None else self.tamper(direction, data))
                await sink.drain()
        await gate.wait()
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()


class _Pair:
    """The two connections that make one."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._near = near
        self._far = far

    def abort_far(self) -> None:
        _reset(self._far)

    def abort(self) -> None:
        _reset(self._near)
        _reset(self._far)


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None:
        # ValueError is how uvloop says that it is closed already.
        with contextlib.suppress(OSError, ValueError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
