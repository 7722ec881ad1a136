"""Clients that keep a fixed number of requests open, and check that each is answered once.

One request is one call; what leaves in one frame is the port's business. The two kinds of client
differ only in what a message is.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import zmq

from benchmarks.loop_workers import BODY, BODY_BYTES
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.zmq_batches import Reader
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.transport.zmq_sockets import new_socket
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry, Placement
from rolloutbus.bus.wire.messages.endings import Ack, AttemptList
from rolloutbus.bus.wire.messages.membership import ClientHeartbeat, Hello

BEAT_S = 0.5
DEADLINE_MS = 60_000
DRAIN_S = 10.0

OnReply = Callable[[int], None]
"""Called with the number of the request that was answered."""


class Client(Protocol):
    """One connection that can ask."""

    on_reply: OnReply
    problem: str
    """Why what was measured is void; empty if it is not."""

    def ask(self, number: int) -> None:
        """Send one request; `number` is used once."""
        ...


class BusClient:
    """A client of the router: hello, heartbeats, `generate`, and an ack for every ending."""

    def __init__(self, endpoint: str, name: str, dialer: Dialer | None = None) -> None:
        self.on_reply: OnReply = _ignore
        self.problem = ""
        self._prefix = f"{name}/"
        self._place = Placement("default", cost=100)
        self._n_heartbeats = 0
        self.is_welcome = False
        self.port = DealerPort(endpoint, self._receive, dialer=dialer)
        self._send = self.port.send
        self._send(Entry("hello", body=pack(Hello("client", name, "0" * 32))))
        self._heartbeat()

    def ask(self, number: int) -> None:
        """Send one `generate`."""
        rid = f"{self._prefix}{number}"
        self._send(Entry("generate", rid, NO_ATTEMPT, "", "", DEADLINE_MS, self._place, BODY))

    def _receive(self, entries: list[Entry]) -> None:
        acks: defaultdict[str, AttemptList] = defaultdict(list)
        on_reply, n_prefix = self.on_reply, len(self._prefix)
        for entry in entries:
            if entry.kind == "finished":
                rid = entry.rid
                acks[entry.route].append((rid, entry.attempt))
                on_reply(int(rid[n_prefix:]))
            elif entry.kind == "welcome":
                self.is_welcome = True
            elif entry.kind == "lost":
                self.problem = f"{entry.route} lost its lease: this machine is too busy"
            elif entry.kind not in {"lease", "members", "accepted", "queued"}:
                raise AssertionError(entry)
        for worker, items in acks.items():
            self._send(Entry("ack", route=f"worker:{worker}", body=pack(Ack(items))))

    def _heartbeat(self) -> None:
        self._n_heartbeats += 1
        self._send(Entry("client_beat", body=pack(ClientHeartbeat(self._n_heartbeats))))
        asyncio.get_running_loop().call_later(BEAT_S, self._heartbeat)


class PlainClient:
    """A client of the C proxy: 200 bytes there, 200 bytes back."""

    def __init__(self, endpoint: str) -> None:
        self.on_reply: OnReply = _ignore
        self.problem = ""
        socket = new_socket(zmq.DEALER)
        socket.connect(endpoint)
        self._recv, self._send = socket.recv, socket.send
        self._padding = bytes(BODY_BYTES - 8)
        self._reader = Reader(socket, self._receive)

    def ask(self, number: int) -> None:
        """Send one message."""
        self._send(number.to_bytes(8, "little") + self._padding, zmq.NOBLOCK)
        # A send may swallow the readable edge of the descriptor.
        self._reader.kick()

    def _receive(self) -> bool:
        try:
            for _ in range(64):
                reply = self._recv(zmq.NOBLOCK)
                self.on_reply(int.from_bytes(reply[:8], "little"))
        except zmq.Again:
            return False
        return True


class Load:
    """Some clients in a closed loop: each answered request is followed by the next one."""

    def __init__(self, clients: list[Client], window: int) -> None:
        self._clients = clients
        self._window = window
        self._open: set[int] = set()
        self._next = 0
        self._is_on = False
        self._drained = asyncio.Event()
        self.n_answered = 0
        self.n_doubled = 0
        """Answers to requests that were not open."""
        for client in clients:
            client.on_reply = self._answering(client)

    async def run(self, seconds: float) -> float:
        """Requests answered per second, over about `seconds`; ends with nothing in flight."""
        self._is_on = True
        first, begun_at = self.n_answered, time.perf_counter()
        for client in self._clients:
            for _ in range(self._window):
                self._ask(client)
        await asyncio.sleep(seconds)
        rate = (self.n_answered - first) / (time.perf_counter() - begun_at)
        self._is_on = False
        if self._open:
            self._drained = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), DRAIN_S)
        return rate

    @property
    def problem(self) -> str:
        """Why what was measured is void; empty if it is not."""
        return next((each.problem for each in self._clients if each.problem), "")

    @property
    def n_lost(self) -> int:
        """Requests that got no answer."""
        return len(self._open)

    def _answering(self, client: Client) -> OnReply:
        still_open = self._open

        def answered(number: int) -> None:
            if number not in still_open:
                self.n_doubled += 1
                return
            still_open.remove(number)
            self.n_answered += 1
            if self._is_on:
                self._ask(client)
            elif not still_open:
                self._drained.set()

        return answered

    def _ask(self, client: Client) -> None:
        self._next += 1
        self._open.add(self._next)
        client.ask(self._next)


def _ignore(_number: int) -> None:
    """Replies before the first request do not count."""
