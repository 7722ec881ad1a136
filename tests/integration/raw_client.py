"""A client that says whatever a test wants said: entries by hand over a real socket."""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from msgspec import Raw

from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.membership import Goodbye, Hello
from tests.integration.live_fleet import Changes

PLACE = Placement("default")


def generate_body(prompt: Sequence[int], sampling: SamplingParams) -> Raw:
    return pack(Generate(np.array(prompt, "<i4").tobytes(), sampling))


class RawClient:
    """Says hello, then only what it is told to; keeps every entry that comes."""

    def __init__(self, address: str, name: str = "raw") -> None:
        self.name = name
        self.entries: list[Entry] = []
        self._n = 0
        self._changes = Changes()
        self._port = DealerPort(address, self._arrived, None)

    async def __aenter__(self) -> Self:
        hello = Hello("client", self.name, boot="0" * 32, epoch="")
        self._port.send(Entry("hello", body=pack(hello)))
        await self.heard("welcome")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._port.send(Entry("goodbye", body=pack(Goodbye())))
        self._port.close(linger_ms=1000)

    def next_rid(self) -> str:
        """One that was not used yet."""
        self._n += 1
        return f"{self.name}/{self._n}"

    def say(
        self, kind: str, rid: str, body: Raw, *, route: str = "", place: Placement | None = None
    ) -> None:
        """Send an entry with a minute to live."""
        entry = Entry(kind, rid, route=route, deadline_ms=60_000, place=place, body=body)
        self._port.send(entry)

    def generate(self, rid: str, body: Raw, place: Placement = PLACE) -> None:
        """Send a `generate`, whatever its body."""
        self.say("generate", rid, body, place=place)

    def send(self, entry: Entry) -> None:
        """Send exactly this."""
        self._port.send(entry)

    async def heard(self, kind: str, rid: str = "") -> Entry:
        """The first entry of this kind and rid."""
        return await self._first(lambda entry: (entry.kind, entry.rid) == (kind, rid))

    async def ending(self, rid: str) -> Entry:
        """The first ending of `rid`."""
        return await self._first(lambda entry: entry.rid == rid and entry.kind in ENDINGS)

    async def problem(self, rid: str) -> Problem:
        """Why `rid` was refused."""
        entry = await self.ending(rid)
        assert entry.kind == "refused", entry
        problem = unpack(entry)
        assert isinstance(problem, Problem)
        return problem

    async def _first(self, is_it: Callable[[Entry], bool]) -> Entry:
        found = await self._changes.until(lambda: [each for each in self.entries if is_it(each)])
        return found[0]

    def _arrived(self, entries: list[Entry]) -> None:
        self.entries += entries
        self._changes.notify()
