"""A real store process, and just enough of a router for it to serve."""

import asyncio
import json
import resource
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from rolloutbus.bus.actor.ref import STORE, ActorRef, Command
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.transport.zmq_ports import RouterPort
from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.control import FleetStatus, Status
from rolloutbus.bus.wire.messages.endings import Ack, Problem
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello, Lease, Welcome
from rolloutbus.bus.wire.messages.weights import Manifest, PullManifest
from rolloutbus.trainer_adapter.client.commands import FleetRef
from rolloutbus.trainer_adapter.client.connection import Connection
from rolloutbus.trainer_adapter.client.core.effects import Result
from rolloutbus.trainer_adapter.client.core.results import Delta, FleetResult
from tests.integration.live_fleet import PLAYED_ROUTER, START_S
from tests.integration.update_router import UpdateRouter

ROOT = Path(__file__).resolve().parents[2]


class StoreHarness:
    """Stands in for the router and for a client: leases the store, passes commands on.

    It answers no heartbeat while a test computes, so the store is patient.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.endpoint = f"ipc://{run_dir}/backend"
        self._process: asyncio.subprocess.Process | None = None
        self.hello: Hello | None = None
        self._port = RouterPort([self.endpoint], self._arrived)
        self._peer: Peer | None = None
        self._leased = asyncio.Event()
        self._endings: dict[str, asyncio.Future[Entry]] = {}
        self._open: dict[str, Entry] = {}
        """Commands that have no ending yet."""
        self.asked: list[str] = []
        """Kinds of all commands to the store, in order."""
        self._n_sent = 0
        self.updates = UpdateRouter(self.ref)
        self.connection = cast("Connection", self.updates)

    dialer = None

    @property
    def bulk(self) -> str:
        assert self.hello is not None
        assert self.hello.store is not None
        return self.hello.store.bulk

    async def digests_kept(self, version: int) -> dict[str, int]:
        """Of each tensor of a version, as the store has them."""
        async with BulkLink(self.bulk) as link:
            manifest = await link.ask("pull_manifest", PullManifest("default", version))
        assert isinstance(manifest, Manifest)
        return {each.name: each.digest for each in manifest.tensors}

    @property
    def _epoch(self) -> str:
        assert self.hello is not None
        return self.hello.epoch

    async def start(self, **settings: object) -> None:
        self._leased.clear()
        whole = {"router": self.endpoint, "directory": f"{self.run_dir}/store"}
        whole |= {"lease": msgspec.to_builtins(PLAYED_ROUTER), "exit_with_parent": True, **settings}
        command = ["-m", "rolloutbus.trainer_adapter.store", "--settings-json", json.dumps(whole)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
        )
        leased = asyncio.create_task(self._leased.wait())
        died = asyncio.create_task(self._process.wait())
        await asyncio.wait((leased, died), timeout=START_S, return_when="FIRST_COMPLETED")
        assert leased.done(), f"the store did not join; exit status {self._process.returncode}"
        died.cancel()

    def ref(self, address: str) -> FleetRef:
        return ActorRef(address, self)

    def tell(self, command: Command, deadline_s: float) -> None:
        raise NotImplementedError

    def stream(self, command: Command, deadline_s: float) -> AsyncGenerator[Delta]:
        raise NotImplementedError

    async def ask(self, command: Command, deadline_s: float) -> Result:
        body = command.body
        if isinstance(body, Status):
            return FleetStatus(1, "test", False, [], {}, 0, 0, 0, {})  # noqa: FBT003 - positional
        assert command.route == STORE
        ending = await self._ask(command.kind, body, deadline_s)
        if ending.kind == "finished":
            return FleetResult({"store": unpack_result(command.kind, ending)})
        problem = unpack(ending)
        assert isinstance(problem, Problem)
        return FleetResult({"store": EngineFailed(problem)})

    async def ended(self) -> int:
        """Waits until the store has ended by itself; returns its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return await self._process.wait()

    def limit_files(self, size_bytes: int) -> None:
        """No file of the store may grow beyond: a disk that is full, or has room again."""
        assert self._process is not None
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.stop()
        self._port.close()

    async def _ask(self, kind: str, body: msgspec.Struct, deadline_s: float) -> Entry:
        assert self._peer is not None
        self._n_sent += 1
        self.asked.append(kind)
        rid = f"test/{self._n_sent}@store"
        attempt = (1, self._n_sent)
        self._endings[rid] = asyncio.get_running_loop().create_future()
        entry = Entry(kind, rid, attempt, self._epoch, body=pack(body))
        self._open[rid] = entry
        self._port.send(self._peer, entry)
        try:
            async with asyncio.timeout(deadline_s):
                ending = await self._endings[rid]
        finally:
            del self._open[rid]
        self._port.send(self._peer, Entry("ack", body=pack(Ack([(rid, attempt)]))))
        return ending

    def _arrived(self, peer: Peer, entries: list[Entry]) -> None:
        for entry in entries:
            match unpack(entry) if entry.kind != "finished" else None:
                case Hello() as hello:
                    self.hello, self._peer = hello, peer
                    welcome = Welcome(router_epoch=1, instance="test", protocol=1, members=[])
                    self._port.send(peer, Entry("welcome", body=pack(welcome)))
                case Heartbeat(seq):
                    lease = Lease(router_epoch=1, instance="test", seq=seq)
                    self._port.send(peer, Entry("lease", body=pack(lease)))
                    # What it was told before it had this lease, or over a link that is gone.
                    for command in self._open.values():
                        self._port.send(peer, replace(command, epoch=self._epoch))
                    # Set by the second heartbeat: then the store has had the answer to its first.
                    if seq > 1:
                        self._leased.set()
                case _:
                    future = self._endings.get(entry.rid)
                    if future is not None and not future.done():
                        future.set_result(entry)


@asynccontextmanager
async def store_harness(run_dir: Path, **settings: object) -> AsyncGenerator[StoreHarness]:
    """A leased store in a process of its own; stopped at the end."""
    harness = StoreHarness(run_dir)
    try:
        await harness.start(**settings)
        yield harness
    finally:
        await harness.close()
