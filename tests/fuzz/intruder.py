"""Peers that may connect and speak the protocol, and say whatever they must not."""

import asyncio
import random
from collections import Counter
from typing import Protocol, cast

import zmq

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.wire.codec import DETACH_ABOVE_BYTES, decode_batch, encode_batch, pack, unpack
from rolloutbus.bus.wire.commands import sent_by
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.membership import Hello
from tests.fuzz.peers import HostilePeer

LANES = 8
BURST = 40
"""Messages on one connection: the tenth malformed one ends its welcome, the rest is ignored."""
LINGER_MS = 2000
VICTIMS = ["echo", "w0", "store", "nobody"]
READING = frozenset({"server_info", "get_load", "check_weights", "get_weights", "list_weights"})
"""Commands of trainers that change nothing."""
PRIVILEGED = sent_by("admin") - sent_by("client") - READING | {"rejected"}
"""Without keys everybody is an operator or a member: who says these is obeyed. With keys the
intruder says them all the same."""


class Ports(Protocol):
    """The endpoints of a fleet."""

    routers: list[str]
    streams: list[str]
    bulk: list[str]


class Intruder:
    """Attacks the ports of one fleet under names of its own."""

    def __init__(self, ports: "Ports", rng: random.Random, dialer: Dialer | None = None) -> None:
        """`dialer` has the key of a client called `intruder`."""
        self._ports = ports
        self._rng = rng
        self._dialer = dialer
        self.answers: Counter[str] = Counter()
        """Kinds of the entries it was sent."""

    async def attack(self, n: int) -> None:
        """Send `n` messages."""
        self._left = n
        with zmq.Context() as context:
            async with asyncio.TaskGroup() as lanes:
                for number in range(LANES):
                    lanes.create_task(self._lane(context, f"intruder-{number}"))

    async def _lane(self, context: "zmq.Context[zmq.Socket[bytes]]", name: str) -> None:
        hostile = HostilePeer(self._rng, name, VICTIMS)
        while self._left > 0:
            n = min(BURST, self._left)
            self._left -= n
            if self._rng.random() < 0.1:
                self._subscribe(context, n)
            else:
                await self._talk(context, hostile, name, n)
            await asyncio.sleep(0)  # who only subscribes has not waited yet

    async def _talk(
        self, context: "zmq.Context[zmq.Socket[bytes]]", hostile: HostilePeer, name: str, n: int
    ) -> None:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            routers, bulk = self._ports.routers, self._ports.bulk
            self._connect(socket, self._rng.choice([*routers, *routers, *bulk]))
            hello = Entry("hello", body=pack(Hello("client", name, "0" * 32)))
            self._say(socket, [encode_batch([hello])])
            for _ in range(n):
                self._say(socket, self._message(hostile))
                self._listen(socket)
                await asyncio.sleep(0)  # the other lanes' turn

    def _say(self, socket: "zmq.Socket[bytes]", message: list[bytes]) -> None:
        try:
            socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:  # the door was shut in its face
            self.answers["(kept out)"] += 1

    def _message(self, hostile: HostilePeer) -> list[bytes]:
        entries = [entry for entry in hostile.batch() if self._may_say(entry)]
        rng = self._rng
        match rng.randrange(20):
            case 0:  # announced and not sent, or sent and not announced
                return [encode_batch(entries), *([b"x" * rng.randrange(9)] * rng.randrange(4))]
            case 1:
                body = bytes(DETACH_ABOVE_BYTES * rng.choice((1, 300)))
                entry = Entry("generate", "a/1", deadline_ms=5, body=NO_BODY, detached=True)
                return [encode_batch([entry]), body]
            case 2:
                return [encode_batch(entries * 200)[: 5 * 1024 * 1024]]
            case _:
                return [encode_batch(entries)]

    def _connect(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        socket.connect(self._dialer.dress(socket, endpoint) if self._dialer else endpoint)

    def _may_say(self, entry: Entry) -> bool:
        if self._dialer is not None:
            return True
        if entry.kind != "hello":
            return entry.kind not in PRIVILEGED
        try:
            hello = cast("Hello", unpack(entry))
        except RemoteProtocolError:
            return True
        return hello.role == "client" and hello.name not in VICTIMS

    def _listen(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.answers.update(entry.kind for entry in decode_batch(frames[0], is_trusted=True))

    def _subscribe(self, context: "zmq.Context[zmq.Socket[bytes]]", n: int) -> None:
        with context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            self._connect(socket, self._rng.choice(self._ports.streams))
            for _ in range(n):
                topic = self._rng.randbytes(self._rng.choice((0, 1, 16, 40, 600)))
                socket.setsockopt(zmq.SUBSCRIBE, topic)
