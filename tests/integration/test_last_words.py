"""What an actor says before it leaves arrives; nobody waits for ever, and nothing stays behind."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from rolloutbus.bus.transport.ports import LAST_WORDS_MS
from rolloutbus.bus.transport.zmq_ports import DealerPort, RouterPort
from rolloutbus.bus.transport.zmq_topics import PubPort, SubPort
from rolloutbus.bus.wire.codec import decode_batch, pack
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.membership import ClientHeartbeat
from rolloutbus.launcher.plan import environment
from tests.architecture.source_tree import ROOT
from tests.integration.live_fleet import DEADLINE_S, PACE_S, START_S, STILL_S, n_held

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ANY = "tcp://127.0.0.1:0"
BEAT = Entry("client_beat", body=pack(ClientHeartbeat(1)))
N_WORDS = 100
WORD_BYTES = 500_000
"""Together more than the system buffers."""
N_LINKS = 20
LEAVER = """
import asyncio, sys
import msgspec
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.transport.zmq_ports import DealerPort

async def main(endpoint, n_words, size_bytes, linger_ms):
    heard = asyncio.Event()
    link = DealerPort(endpoint, lambda _: heard.set())
    link.send(Entry("client_beat", "hello"))
    await heard.wait()
    body = msgspec.Raw(msgspec.msgpack.encode(bytes(size_bytes)))
    for n in range(n_words):
        link.send(Entry("finished", f"w/{n}", body=body))
    link.send(Entry("goodbye"))
    link.close(linger_ms=linger_ms)
    print("closed", flush=True)

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""
"""Waits until its link is up, says much, and is gone."""


@asynccontextmanager
async def left(linger_ms: int) -> AsyncGenerator[tuple[Process, zmq.Socket[bytes]]]:
    """A process that has closed its link, and its peer, which has not heard its words yet."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 65_536)
        peer.setsockopt(zmq.RCVTIMEO, int(1000 * START_S))
        endpoint = f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LEAVER, endpoint),
            *(str(number) for number in (N_WORDS, WORD_BYTES, linger_ms)),
            cwd=ROOT,
            env={**environment(), "PYTHONPATH": str(ROOT)},
            stdout=PIPE,
            stderr=PIPE,
        )
        assert process.stdout is not None
        peer_id, hello = await asyncio.to_thread(peer.recv_multipart)
        peer.send_multipart([peer_id, hello])
        async with asyncio.timeout(DEADLINE_S):
            assert await process.stdout.readline() == b"closed\n"
        yield process, peer
        assert process.returncode == 0


async def ended(process: Process) -> None:
    async with asyncio.timeout(DEADLINE_S):
        _, said = await process.communicate()
    assert said == b""


async def test_a_process_stays_until_its_last_words_are_out() -> None:
    async with left(linger_ms=int(1000 * DEADLINE_S)) as (process, peer):
        rids: list[str] = []
        last = ""
        while last != "goodbye":
            _, frame, *_ = await asyncio.to_thread(peer.recv_multipart)
            entries = decode_batch(frame)
            rids += [entry.rid for entry in entries]
            last = entries[-1].kind
        await ended(process)
    assert rids == [*(f"w/{n}" for n in range(N_WORDS)), ""]


async def test_a_process_ends_although_its_peer_takes_nothing_any_more() -> None:
    async with left(linger_ms=LAST_WORDS_MS) as (process, peer):
        await ended(process)
        n_arrived = 0
        while peer.poll(100):
            peer.recv_multipart()
            n_arrived += 1
    assert n_arrived < N_WORDS, "it was not deaf: nothing was left to wait for"


def held() -> tuple[int, int]:
    """(threads, descriptors) of this process."""
    return n_held("task"), n_held("fd")


def ignore(_: bytes, __: list[Entry]) -> None:
    """Nothing is published."""


async def meet(ipc_path: Path) -> None:
    """Ports of every kind come, speak and go."""
    heard = asyncio.Event()

    def hear(peer: Peer, _: list[Entry]) -> None:
        router.send(peer, BEAT)

    router = RouterPort([ANY, f"ipc://{ipc_path}"], hear)
    publisher = PubPort(ANY)
    subscriber = SubPort(ignore, ["ann"])
    subscriber.connect(publisher.endpoint)
    links = [DealerPort(router.endpoints[n % 2], lambda _: heard.set()) for n in range(N_LINKS)]
    for link in links:
        link.send(BEAT)
    async with asyncio.timeout(DEADLINE_S):
        await heard.wait()
    for link in links:
        link.send(BEAT)
        link.close(linger_ms=LAST_WORDS_MS)
    for port in (subscriber, publisher, router):
        port.close()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A directory for sockets."""
    tmp_path.chmod(0o700)
    return tmp_path


async def test_ports_that_were_closed_leave_no_thread_and_no_descriptor(private: Path) -> None:
    await meet(private / "first")
    async with asyncio.timeout(DEADLINE_S):
        # libzmq closes descriptors in a thread of its own, and tells nobody. A look too early makes
        # this test lenient, never wrong.
        await asyncio.sleep(STILL_S)
        before = held()
        for n in range(3):
            await meet(private / str(n))
        while held() > before:  # noqa: ASYNC110
            await asyncio.sleep(PACE_S)
