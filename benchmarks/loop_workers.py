"""Echo workers for both sides: every request is answered at once with 200 bytes.

The bus worker is an honest member (real hello, heartbeats and leases by the shipped `MemberCore`)
but keeps no outbox: what is measured is the middle, and a worker that costs more would hide it.
"""

import asyncio
import secrets
import sys
from random import Random

import msgspec
import uvloop
import zmq

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity
from rolloutbus.bus.membership.deliveries import MemberEffect
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.zmq_batches import Reader
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.transport.zmq_sockets import new_socket
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import WorkerFacts

BODY_BYTES = 200
BODY = msgspec.Raw(msgspec.msgpack.encode(bytes(BODY_BYTES - 2)))
"""200 bytes of MessagePack; no process on the way looks inside."""
SLOTS = 256
TICK_S = 0.1


class EchoWorker:
    """One worker endpoint on the bus."""

    def __init__(self, endpoint: str, name: str, dialer: Dialer | None = None) -> None:
        self._endpoint = endpoint
        self._dialer = dialer
        self._clock = BootClock()
        identity = MemberIdentity("worker", name, secrets.token_hex(16))
        self._core = MemberCore(identity, LeaseSettings(), Random())
        self._port: DealerPort | None = None
        facts = WorkerFacts("default", "", SLOTS, 4096, 32_000, "fake", ["generate"])
        self._apply(self._core.online(facts, self._clock.now()))
        self._tick()

    def _apply(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and self._port:
                self._port.send(effect.entry)
            elif isinstance(effect, Connect):
                if self._port is not None:  # the machine was too busy for heartbeats: join again
                    self._port.close()
                self._port = DealerPort(self._endpoint, self._receive, dialer=self._dialer)

    def _receive(self, entries: list[Entry]) -> None:
        assert self._port is not None
        send = self._port.send
        for entry in entries:
            if entry.kind == "generate":
                send(
                    Entry(
                        "finished",
                        entry.rid,
                        entry.attempt,
                        entry.epoch,
                        entry.route,
                        0,
                        None,
                        BODY,
                    )
                )
            elif entry.kind != "ack":
                self._apply(self._core.receive([entry], self._clock.now()))

    def _tick(self) -> None:
        self._apply(self._core.tick(self._clock.now()))
        asyncio.get_running_loop().call_later(TICK_S, self._tick)


class PlainWorker:
    """One worker endpoint behind the C proxy: a DEALER that sends back what it got."""

    def __init__(self, endpoint: str) -> None:
        socket = new_socket(zmq.DEALER)
        socket.connect(endpoint)
        self._recv, self._send = socket.recv, socket.send
        self._reader = Reader(socket, self._echo)

    def _echo(self) -> bool:
        try:
            for _ in range(64):
                client = self._recv(zmq.NOBLOCK)
                body = self._recv(zmq.NOBLOCK)
                self._send(client, zmq.SNDMORE | zmq.NOBLOCK)
                self._send(body, zmq.NOBLOCK)
        except zmq.Again:
            self._reader.after_send()
            return False
        return True


async def serve(side: str, endpoint: str, numbers: list[str]) -> None:
    """One worker per number, until the process is ended."""
    _workers = [
        EchoWorker(endpoint, f"w{number}") if side == "router" else PlainWorker(endpoint)
        for number in numbers
    ]
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2], sys.argv[3:]))
