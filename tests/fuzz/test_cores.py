"""Well-formed malice: the cores take whatever passes the decoder, stay up, and serve the others."""

import random
from contextlib import suppress

import msgspec
import pytest

from rolloutbus.bus.wire.codec import decode_batch, encode_batch, unpack
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.control import Resume
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.weights import PullChunk, PullManifest, PushChunk, ReserveVersion
from rolloutbus.router.events import Malformed
from rolloutbus.trainer_adapter.store.core import StoreCore
from rolloutbus.trainer_adapter.store.settings import StoreSettings
from rolloutbus.trainer_adapter.store.versions import BulkAsker, VersionTable
from tests.fuzz.peers import HostilePeer
from tests.unit.engine_worker.core_bench import Bench as WorkerBench
from tests.unit.router.harness import Bus, SimPeer
from tests.unit.trainer_adapter.bench import Bench as ClientBench

pytestmark = pytest.mark.timeout(600)

N_BATCHES = 4000
VICTIMS = ["trainer", "w0", "store", "nobody"]


class Rude(SimPeer):
    """A connection that sends what a hostile peer makes; it never heartbeats."""

    def __init__(self, bus: Bus, hostile: HostilePeer) -> None:
        super().__init__(bus, "rude")
        self.is_alive = False
        self._hostile = hostile

    def attack(self) -> None:
        """One batch, as the socket would hand it over."""
        try:
            entries = decode_batch(self._hostile.frame())
        except RemoteProtocolError:
            self.bus.apply(self.bus.core.handle(Malformed(self.peer), self.bus.now))
        else:
            self.say(*entries)


def test_a_router_outlives_hostile_peers_and_serves_the_others(rng: random.Random) -> None:
    bus = Bus()
    trainer, worker = bus.client(), bus.worker()
    rude = Rude(bus, HostilePeer(rng, "rude", VICTIMS))
    for n in range(N_BATCHES):
        if n % 20 == 0:
            rude = Rude(bus, HostilePeer(rng, f"rude-{n % 60}", VICTIMS))
        rude.attack()
        if n % 200 == 0:
            bus.advance(0.5)
    assert bus.counters["malformed"] > N_BATCHES // 20
    assert bus.counters["offenders_dismissed"] > 0
    # Without keys a name is whoever said hello with it last: its owners come back.
    trainer.is_alive = worker.is_alive = False
    bus.advance(40.0)
    late, fresh = bus.client("late"), bus.worker("w7")
    # Without keys anyone may pause a fleet, too; it is told so, and whoever knows can end it.
    late.ask("resume", Resume(), "fleet")
    for command in fresh.take("resume"):
        fresh.end(command, body=Done())
    bus.advance(1.0)
    rid = late.generate()
    (command,) = fresh.take("generate")
    fresh.accept(command)
    fresh.end(command)
    assert command.rid == rid
    assert rid in {ending.rid for ending in late.take("finished")}


def test_a_client_outlives_a_hostile_router_and_hostile_workers(
    rng: random.Random, seed: int
) -> None:
    hostile = HostilePeer(rng, "c", ["c", "w0"])
    client = ClientBench(seed)
    n_ended = 0
    for n in range(N_BATCHES):
        if n % 20 == 0:
            n_ended += len(client.outcomes)
            client = ClientBench(seed + n)
            client.welcome()
            # The requests and the attempt that the good messages are about.
            for rid in ("trainer/7", "trainer/8"):
                client.generate(rid=rid, stream=True)
                client.accept(rid, (3, 41))
        try:
            entries = decode_batch(hostile.frame())
        except RemoteProtocolError:
            continue
        # A router that dismisses its client has its way; that is all there would be to see.
        entries = [entry for entry in entries if entry.kind != "dismissed"]
        receive = client.core.receive if n % 2 else client.core.receive_stream
        client.apply(receive(entries, client.clock.now()))
        if n % 10 == 0:
            client.pass_time(0.5)
    assert n_ended > N_BATCHES // 200, "nothing hostile was about a request of the client"


def test_a_worker_outlives_hostile_commands(rng: random.Random) -> None:
    worker = WorkerBench()
    worker.join()
    hostile = HostilePeer(rng, "c", ["c", "w0"])
    own_epoch = worker.core.member.epoch
    for n in range(N_BATCHES):
        try:
            entries = decode_batch(hostile.frame())
        except RemoteProtocolError:
            continue
        worker.router(*(msgspec.structs.replace(entry, epoch=own_epoch) for entry in entries))
        if n % 100 == 0:
            worker.pass_time(0.5)
    encode_batch(worker.said.sent("finished") + worker.said.sent("refused"))


def test_a_store_outlives_hostile_bulk_peers(rng: random.Random) -> None:
    core = StoreCore(StoreSettings("ipc:///r", "/nowhere"), "host", VersionTable())
    hostile = HostilePeer(rng, "c", ["default"])
    asker = BulkAsker(b"\x01" * 16, "1")  # pyright: ignore[reportArgumentType]
    n_handled = 0
    for n in range(N_BATCHES):
        for entry in hostile.batch():
            with suppress(RemoteProtocolError):
                command = unpack(entry)
                if isinstance(command, ReserveVersion | PullManifest | PullChunk | PushChunk):
                    core.handle(asker, command, float(n))
                    n_handled += 1
        core.tick(float(n))
    assert n_handled > N_BATCHES // 20
