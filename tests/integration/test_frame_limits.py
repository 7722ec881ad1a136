"""The largest legal message passes; what is larger ends at the socket, for its sender alone."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.security.zmq_guard import Doorway, SocketGuard
from rolloutbus.bus.transport.zmq_batches import SKIP_FRAMES, Reader
from rolloutbus.bus.transport.zmq_ports import DealerPort, RouterPort
from rolloutbus.bus.transport.zmq_sockets import CURVE_BYTES, new_socket
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES, encode_batch, pack
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Peer, Placement
from rolloutbus.bus.wire.limits import (
    CHUNK_BYTES,
    MAX_BATCH_ENTRIES,
    MAX_BODY_BYTES,
    MAX_BULK_IN_BYTES,
    MAX_DEADLINE_MS,
    MAX_HEADER_CHARS,
    MAX_ITEMS,
    MAX_RID_CHARS,
    MAX_SHORT_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_BYTES,
)
from rolloutbus.bus.wire.messages.generation import Generate, Prefix, SamplingParams
from rolloutbus.bus.wire.messages.weights import PushChunk
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, Changes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ANY = "tcp://127.0.0.1:0"
BEAT = Entry("client_beat", "small")
HUGE = 2**64 - 1
COLUMN = bytes(MAX_TOKENS_BYTES)


class Listener:
    """A port that keeps what it hears and whom it hears nonsense from."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.entries: list[Entry] = []
        self.offenders: list[Peer] = []
        self._changes = Changes()
        self.port = RouterPort([ANY], self._hear, self._offended, max_body_bytes=max_body_bytes)

    def add(self, entries: list[Entry]) -> None:
        # A body is a view of the frame; the tests keep it.
        for entry in entries:
            body = msgspec.Raw(bytes(entry.body))
            self.entries.append(msgspec.structs.replace(entry, body=body))
        self._changes.notify()

    async def until(self, is_so: Callable[[], bool]) -> None:
        await self._changes.until(is_so)

    async def hears(self, rid: str) -> Entry:
        await self.until(lambda: any(entry.rid == rid for entry in self.entries))
        return next(entry for entry in self.entries if entry.rid == rid)

    def _hear(self, _: Peer, entries: list[Entry]) -> None:
        self.add(entries)

    def _offended(self, peer: Peer) -> None:
        self.offenders.append(peer)
        self._changes.notify()


@asynccontextmanager
async def listening(max_body_bytes: int = MAX_BODY_BYTES) -> AsyncGenerator[tuple[Listener, str]]:
    listener = Listener(max_body_bytes)
    try:
        yield listener, listener.port.endpoints[0]
    finally:
        listener.port.close()


@contextmanager
def rude_peer(endpoint: str) -> Generator[zmq.Socket[bytes]]:
    """A socket that checks nothing before it sends."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(endpoint)
        yield socket


def unsigned(_: Peer, __: list[Entry]) -> None:
    raise AssertionError("a guarded endpoint has no unsigned entries")


def ignore(_: list[Entry]) -> None:
    """Nothing is answered."""


def largest_generate() -> msgspec.Raw:
    """Every field as long as its type lets it be."""
    runs = [(HUGE, HUGE)] * MAX_ITEMS
    sampling = SamplingParams(
        max_new_tokens=2**62, sampling_seed=2**62, stop_token_ids=[2**62] * MAX_STOP_TOKEN_IDS
    )
    prefix = Prefix(COLUMN, COLUMN, runs, COLUMN)
    return pack(Generate(COLUMN, sampling, stream=True, prefix=prefix))


def detached(rid: str, size_bytes: int) -> list[bytes]:
    """A message with a body of exactly this size."""
    entry = Entry("generate", rid, deadline_ms=5, body=NO_BODY, detached=True)
    return [encode_batch([entry]), bytes(size_bytes)]


async def serves(listener: Listener, endpoint: str, rid: str) -> None:
    """Somebody else is heard."""
    link = DealerPort(endpoint, ignore)
    link.send(Entry("client_beat", rid))
    await listener.hears(rid)
    link.close()


async def test_the_largest_legal_request_passes_in_the_clear() -> None:
    body = largest_generate()
    assert MAX_BODY_BYTES * 0.85 < len(body) <= MAX_BODY_BYTES
    async with listening() as (listener, endpoint):
        link = DealerPort(endpoint, ignore)
        link.send(Entry("generate", "largest", deadline_ms=5, body=body))
        assert bytes((await listener.hears("largest")).body) == bytes(body)
        link.close()


async def test_the_largest_body_passes_encrypted(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path)
    keys.make_unlisted("router")
    keys.add("ann", "client")
    guard = SocketGuard(keys.server_settings("router"))
    async with listening() as (listener, _):

        def hear(_: Peer, __: Principal, entries: list[Entry]) -> None:
            listener.add(entries)

        port = RouterPort([ANY], unsigned, doorways=[Doorway(guard, "frontend", hear)])
        link = DealerPort(port.endpoints[0], ignore, dialer=dialer_of(keys.client_settings("ann")))
        body = msgspec.Raw(bytes(MAX_BODY_BYTES))
        link.send(Entry("generate", "largest", deadline_ms=5, body=body))
        assert len((await listener.hears("largest")).body) == MAX_BODY_BYTES
        link.close()
        port.close()
    guard.close()


async def test_a_body_of_one_byte_more_is_counted_and_its_sender_named() -> None:
    async with listening() as (listener, endpoint):
        with rude_peer(endpoint) as rude:
            rude.send_multipart(detached("too large", MAX_BODY_BYTES + 1))
            rude.send_multipart([encode_batch([BEAT])])
            await listener.hears("small")
        assert len(listener.offenders) == listener.port.counters.malformed_in == 1
        assert [entry.rid for entry in listener.entries] == ["small"]


async def test_who_sends_a_larger_frame_is_cut_off_and_nobody_else() -> None:
    async with listening() as (listener, endpoint):
        other = DealerPort(endpoint, ignore)
        other.send(Entry("client_beat", "before"))
        await listener.hears("before")
        socket = new_socket(zmq.DEALER)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        is_down = asyncio.Event()
        watch = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        reader = Reader(watch, lambda: bool(is_down.set()))
        socket.connect(endpoint)
        socket.send_multipart(detached("too large", MAX_BODY_BYTES + CURVE_BYTES + 1))
        async with asyncio.timeout(DEADLINE_S):
            await is_down.wait()
        reader.close()
        socket.disable_monitor()
        watch.close()
        socket.close()
        other.send(Entry("client_beat", "after"))
        await listener.hears("after")
        other.close()
        assert [entry.rid for entry in listener.entries] == ["before", "after"]


async def test_we_never_send_a_body_that_would_end_the_link() -> None:
    async with listening() as (listener, endpoint):
        downs: list[None] = []
        link = DealerPort(endpoint, ignore, lambda: downs.append(None))
        body = msgspec.Raw(bytes(MAX_BODY_BYTES + 1))
        link.send(Entry("generate", "too large", deadline_ms=5, body=body))
        link.send(Entry("client_beat", "after"))
        await listener.hears("after")
        link.close()
        assert [entry.rid for entry in listener.entries] == ["after"]
        assert link.counters.dropped_out == 1
        assert not downs


async def test_the_largest_entries_never_make_a_batch_that_is_too_large() -> None:
    text = "\N{GRINNING FACE}" * MAX_HEADER_CHARS
    place = Placement(text, text, text, text, HUGE, HUGE, resend=True)
    body = msgspec.Raw(msgspec.msgpack.encode(bytes(DETACH_ABOVE_BYTES - 3)))
    assert len(body) == DETACH_ABOVE_BYTES
    n = 2 * MAX_BATCH_ENTRIES + 1
    async with listening() as (listener, endpoint):
        link = DealerPort(endpoint, ignore)
        for _ in range(n):
            link.send(
                Entry(
                    kind=text,
                    rid="\N{GRINNING FACE}" * MAX_RID_CHARS,
                    attempt=(HUGE, HUGE),
                    epoch=text,
                    route=text,
                    deadline_ms=MAX_DEADLINE_MS,
                    place=place,
                    body=body,
                )
            )
        await listener.until(lambda: len(listener.entries) >= n or bool(listener.offenders))
        link.close()
        assert not listener.offenders


async def test_a_message_of_endless_frames_is_one_offence_and_the_next_is_heard() -> None:
    frames = [encode_batch([BEAT]), *([b"x"] * (10 * SKIP_FRAMES))]
    async with listening() as (listener, endpoint):
        with rude_peer(endpoint) as rude:
            rude.send_multipart(frames)
            rude.send_multipart([encode_batch([Entry("client_beat", "after")])])
            await listener.hears("after")
        await serves(listener, endpoint, "other")
        assert len(listener.offenders) == listener.port.counters.malformed_in == 1
        assert [entry.rid for entry in listener.entries] == ["after", "other"]


@pytest.mark.parametrize("n_frames", [3, 16, 17, 18, 17 + SKIP_FRAMES, 18 + SKIP_FRAMES])
async def test_every_number_of_frames_too_many_is_read_to_its_end(n_frames: int) -> None:
    async with listening() as (listener, endpoint):
        with rude_peer(endpoint) as rude:
            rude.send_multipart([encode_batch([BEAT])] * n_frames)
            rude.send_multipart([encode_batch([Entry("client_beat", "after")])])
            await listener.hears("after")
        assert [entry.rid for entry in listener.entries] == ["after"]
        assert len(listener.offenders) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: router\r\n\r\n" + b"x" * 4000,
        b"\x05\0abcd" + b"\x09\0" + b"message.",
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0\x09\0message.",
    ],
    ids=["web request", "ZMTP 1", "ZMTP 2"],
)
async def test_old_protocols_without_a_handshake_are_hung_up_on_unread(said: bytes) -> None:
    async with listening() as (listener, endpoint), asyncio.timeout(DEADLINE_S):
        address = urlsplit(endpoint)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)  # until it has hung up
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await serves(listener, endpoint, "other")
        assert listener.offenders == []
        assert [entry.rid for entry in listener.entries] == ["other"]


async def test_who_says_nothing_is_not_remembered() -> None:
    async with listening() as (listener, endpoint):
        with rude_peer(endpoint) as rude:
            for _ in range(20):
                rude.send_multipart([encode_batch([])])
            rude.send_multipart([b"garbage"])
            await listener.until(lambda: bool(listener.offenders))
            assert listener.port.counters.frames_in == 20
            (peer,) = listener.offenders
            listener.port.send(peer, BEAT)
        assert listener.port.counters.dropped_out == 1


async def test_a_stores_socket_takes_a_chunk_and_not_much_more() -> None:
    chunk = PushChunk("\N{GRINNING FACE}" * MAX_SHORT_CHARS, HUGE, HUGE, bytes(CHUNK_BYTES))
    assert len(pack(chunk)) <= MAX_BULK_IN_BYTES
    async with listening(MAX_BULK_IN_BYTES) as (listener, endpoint):
        downs = asyncio.Event()
        link = DealerPort(endpoint, ignore, downs.set)
        link.send(Entry("push_chunk", "chunk", body=pack(chunk)))
        await listener.hears("chunk")
        too_large = msgspec.Raw(bytes(MAX_BULK_IN_BYTES + CURVE_BYTES + 1))
        link.send(Entry("push_chunk", "too large", body=too_large))
        async with asyncio.timeout(DEADLINE_S):
            await downs.wait()
        link.close()
        await serves(listener, endpoint, "other")
        assert [entry.rid for entry in listener.entries] == ["chunk", "other"]
