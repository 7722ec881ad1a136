"""The link between worker actor and engine host: batches of entries over a socket pair.

A socket pair has no name that others could connect to, nothing to clean up, and ends the moment
either process does. Frames are length-prefixed batches, one per loop tick. Spec:
docs/protocol.md, "Engine host".
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from rolloutbus.bus.wire.codec import decode_batch, encode_batch, runs_within
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024
CUT_BYTES = MAX_FRAME_BYTES // 4
"""A batch whose bodies have more is written as several: results with arrays may be large."""

EntriesHandler = Callable[[list[Entry]], None]


class HostLink(asyncio.Protocol):
    """One end; lives on the event loop it was opened on."""

    def __init__(self, on_entries: EntriesHandler) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_entries = on_entries
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiting: list[Entry] = []
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def open(cls, end: socket.socket, on_entries: EntriesHandler) -> "HostLink":
        """Speak over a connected Unix stream socket, which the link then owns."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(on_entries), sock=end)
        return link

    def hand_over(self, on_entries: EntriesHandler) -> None:
        """Give what arrives to another handler from now on."""
        self._on_entries = on_entries

    def send(self, entry: Entry) -> None:
        """Queue for the end of this loop tick; dropped when the link is closed."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(entry)

    def flush(self) -> None:
        """Write what is queued now."""
        waiting, self._waiting = self._waiting, []
        if waiting and self._transport is not None and not self._closed.done():
            for part in _frames(waiting):
                frame = encode_batch(part)
                self._transport.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)

    def close(self) -> None:
        """Close once everything queued is written."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    async def closed(self) -> None:
        """Return when the link has ended and all that came over it was delivered."""
        await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc  # how it ended does not matter: the other process is gone or leaving
        if not self._closed.done():
            self._closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol.

        Raises:
            RemoteProtocolError: not a batch; the link is closed.
        """
        received = self._received
        received += data
        entries: list[Entry] = []
        start = 0
        while len(received) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            stop = body + int.from_bytes(received[start:body], "little")
            if stop - body > MAX_FRAME_BYTES:
                self.close()
                raise RemoteProtocolError(f"a frame of {stop - body} bytes on the host link")
            if stop > len(received):
                break
            # Copied out: bodies are views of it and live longer than the buffer.
            entries += decode_batch(bytes(received[body:stop]), is_trusted=True)
            start = stop
        del received[:start]
        if entries:
            self._on_entries(entries)


def _frames(entries: list[Entry]) -> list[list[Entry]]:
    """In order, cut so that each may be sent as a frame; mostly one."""
    if sum(len(entry.body) for entry in entries) <= CUT_BYTES:
        return [entries]
    return runs_within(CUT_BYTES, entries, lambda entry: len(entry.body))
