"""A real worker process with the fake engine, against a router that only says what a test says."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from rolloutbus.bus.transport.zmq_ports import RouterPort
from rolloutbus.bus.transport.zmq_topics import SubPort
from rolloutbus.bus.wire.codec import pack, topic_of, unpack
from rolloutbus.bus.wire.entry import Entry, Peer, Placement
from rolloutbus.bus.wire.messages.endings import Accepted
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello, Lease, Welcome
from tests.integration.live_fleet import PLAYED_ROUTER, START_S, Changes

CLIENT = "client"

Found = TypeVar("Found")


def generate_body(n_new: int, *, stream: bool = False, prompt: tuple[int, ...] = (1, 2, 3)) -> Raw:
    sampling = SamplingParams(max_new_tokens=n_new, ignore_eos=True, sampling_seed=7)
    return pack(Generate(np.array(prompt, np.int32).tobytes(), sampling, stream=stream))


class ScriptedRouter:
    """Welcomes and leases everybody; keeps all that is said."""

    def __init__(self, endpoint: str) -> None:
        self.port = RouterPort([endpoint], self._arrived)
        self.entries: list[Entry] = []
        self.published: list[Entry] = []
        self.peer: Peer | None = None
        self.hello: Hello | None = None
        self.epoch = ""
        self._changes = Changes()
        self._sub = SubPort(self._streamed, [CLIENT])

    def close(self) -> None:
        self.port.close()
        self._sub.close()

    def send(self, kind: str, rid: str, body: Raw, place: Placement | None = None) -> None:
        assert self.peer is not None
        entry = Entry(kind, rid, (1, 1), self.epoch, CLIENT, 60_000, place, body)
        self.port.send(self.peer, entry)

    def generate(self, rid: str, body: Raw, versions: str = "any") -> None:
        self.send("generate", rid, body, Placement("default", versions))

    def said(self, kind: str, rid: str | None = None) -> list[Entry]:
        return [e for e in self.entries if e.kind == kind and rid in (None, e.rid)]

    async def until(self, condition: Callable[[], Found]) -> Found:
        return await self._changes.until(condition, START_S)  # a process may have to start first

    async def ending(self, rid: str) -> Entry:
        kinds = {"finished", "failed", "cancelled", "expired", "refused"}
        found = await self.until(
            lambda: [e for e in self.entries if e.rid == rid and e.kind in kinds]
        )
        return found[0]

    async def accepted(self, rid: str) -> None:
        """Wait until the worker has taken this request."""

        def told() -> list[Accepted]:
            return [
                each for each in map(unpack, self.said("accepted")) if isinstance(each, Accepted)
            ]

        await self.until(lambda: any((rid, (1, 1)) in each.items for each in told()))

    async def joined(self) -> None:
        """Wait until the worker has, which starts meanwhile."""
        await self._changes.until(lambda: self.peer is not None and self.said("beat"), START_S)

    async def subscribed(self) -> None:
        """Wait until what the worker publishes comes here; it takes effect some time after."""
        n_tried = 0
        while not self.published:
            n_tried += 1
            self.generate(f"c/0{n_tried}", generate_body(1))
            await self.ending(f"c/0{n_tried}")

    def _arrived(self, peer: Peer, entries: list[Entry]) -> None:
        for entry in entries:
            self.entries.append(entry)
            if entry.kind == "hello":
                hello = unpack(entry)
                assert isinstance(hello, Hello)
                assert hello.worker is not None
                if self.hello is None or self.hello.worker != hello.worker:
                    self._sub.connect(hello.worker.stream)
                self.hello, self.peer, self.epoch = hello, peer, hello.epoch
                self.port.send(peer, Entry("welcome", body=pack(Welcome(1, "r", 1, []))))
            elif entry.kind == "beat":
                heartbeat = unpack(entry)
                assert isinstance(heartbeat, Heartbeat)
                self.port.send(peer, Entry("lease", body=pack(Lease(1, "r", heartbeat.seq))))
        self._changes.notify()

    def _streamed(self, topic: bytes, entries: list[Entry]) -> None:
        assert topic == topic_of(CLIENT)
        self.published += entries
        self._changes.notify()


@asynccontextmanager
async def worker_process(
    tmp_path: Path, **settings: object
) -> AsyncGenerator[tuple[ScriptedRouter, asyncio.subprocess.Process]]:
    """A worker named w0, ready; killed at the end if it is still there."""
    endpoint = f"ipc://{tmp_path}/router"
    router = ScriptedRouter(endpoint)
    described: dict[str, object] = {
        "name": "w0",
        "router": endpoint,
        "stream": f"ipc://{tmp_path}/stream",
        "engine": "fake",
        "lease": PLAYED_ROUTER,
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rolloutbus.engine_worker",
        f"--settings-json={msgspec.json.encode(described).decode()}",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield router, process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        router.close()
