"""A router and one worker that say only what a test says, to subscribers with real sockets."""

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rolloutbus.bus.transport.zmq_ports import RouterPort
from rolloutbus.bus.transport.zmq_topics import PubPort
from rolloutbus.bus.wire.codec import pack, topic_of, unpack
from rolloutbus.bus.wire.entry import Attempt, Entry, Peer
from rolloutbus.bus.wire.messages.control import FleetOutcome, WorkerOutcome
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Deltas, Idle, Repair, Repaired
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Lease,
    Member,
    Welcome,
)

WORKER = "w0"
ATTEMPT: Attempt = (1, 1)


def token_of(index: int) -> int:
    """Every stream has the same ones."""
    return 3 * index


def tokens_of(n: int) -> list[int]:
    """The first `n` of them."""
    return [token_of(index) for index in range(n)]


def _columns(start: int, stop: int) -> tuple[bytes, bytes]:
    tokens = [token_of(index) for index in range(start, stop)]
    n = len(tokens)
    return struct.pack(f"<{n}i", *tokens), struct.pack(f"<{n}f", *tokens)


class ScriptedFleet:
    """It welcomes everybody, answers repairs of running streams, and publishes."""

    def __init__(self, directory: Path) -> None:
        self.address = f"ipc://{directory}/front"
        self.pub = PubPort(f"ipc://{directory}/stream")
        self.running: dict[str, int] = {}
        """rid -> tokens so far; each of another client."""
        self._peers: set[Peer] = set()
        self._port = RouterPort([self.address], self._heard)

    def close(self) -> None:
        self._port.close()
        self.pub.close()

    def dismiss(self, code: str) -> None:
        """Send everybody away."""
        for peer in self._peers:
            self._port.send(peer, Entry("dismissed", body=pack(Dismissed(code, "not you"))))

    async def step(self) -> None:
        """One token more for each stream that runs; one message for each client."""
        for rid, start in self.running.items():
            self.running[rid] = start + 1
            tokens, logprobs = _columns(start, start + 1)
            self._publish(
                "deltas", rid, Deltas([rid], [ATTEMPT], [start], [1], tokens, logprobs, [0])
            )
        await asyncio.sleep(0)  # messages leave at the end of a turn

    async def sample(self, rids: Sequence[str], n_tokens: int) -> None:
        """Streams from their first token to their end."""
        self.running |= dict.fromkeys(rids, 0)
        for _ in range(n_tokens):
            await self.step()
        for rid in rids:
            await self.finish(rid)

    async def finish(self, rid: str) -> None:
        """This stream ends."""
        end = self.running.pop(rid)
        last = Deltas([rid], [ATTEMPT], [end], [0], b"", b"", [0], [(0, "stop")])
        self._publish("deltas", rid, last)
        await asyncio.sleep(0)

    async def heartbeat(self) -> None:
        """Say what runs."""
        for rid, n_tokens in self.running.items():
            self._publish("idle", rid, Idle([rid], [ATTEMPT], [n_tokens]))
        await asyncio.sleep(0)

    def _publish(self, kind: str, rid: str, body: Deltas | Idle) -> None:
        topic = topic_of(rid.rpartition("/")[0])
        self.pub.publish(topic, Entry(kind, route=WORKER, body=pack(body)))

    def _heard(self, peer: Peer, entries: list[Entry]) -> None:
        for entry in entries:
            match entry.kind:
                case "hello":
                    self._peers.add(peer)
                    member = Member(WORKER, "e.1", self.pub.endpoint, "ready", 0, "default")
                    body = pack(Welcome(1, "r", 1, [member]))
                    self._port.send(peer, Entry("welcome", body=body))
                case "client_beat":
                    heartbeat = unpack(entry)
                    assert isinstance(heartbeat, ClientHeartbeat)
                    self._port.send(peer, Entry("lease", body=pack(Lease(1, "r", heartbeat.seq))))
                case "repair":
                    repair = unpack(entry)
                    assert isinstance(repair, Repair)
                    outcome = FleetOutcome([self._repaired(repair)], [])
                    reply = Entry("finished", entry.rid, body=pack(outcome))
                    self._port.send(peer, reply)
                case _:
                    pass

    def _repaired(self, repair: Repair) -> WorkerOutcome:
        n_tokens = self.running.get(repair.rid)
        if n_tokens is None:
            problem = Problem("bad_request", "This attempt does not run here.", "not_started")
            return WorkerOutcome(WORKER, "refused", pack(problem))
        columns = _columns(repair.start, n_tokens)
        runs = [(0, n_tokens - repair.start)] if n_tokens > repair.start else []
        return WorkerOutcome(WORKER, "finished", pack(Repaired(repair.start, *columns, runs)))


@asynccontextmanager
async def scripted_fleet(directory: Path) -> AsyncGenerator[ScriptedFleet]:
    fleet = ScriptedFleet(directory)
    try:
        yield fleet
    finally:
        fleet.close()
