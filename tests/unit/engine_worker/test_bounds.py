"""However many requests a worker has had, it remembers a bounded number of them, or for a while."""

import random

import numpy as np
import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.control import Pause
from rolloutbus.bus.wire.messages.endings import Ack
from rolloutbus.bus.wire.messages.generation import Deltas, Generate, SamplingParams
from rolloutbus.bus.wire.messages.host import EngineHeartbeat, EngineReady
from rolloutbus.bus.wire.messages.membership import Lease
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.core import WorkerCore
from tests.unit.engine_worker.core_bench import READY
from tests.unit.sizes import largest

pytestmark = pytest.mark.timeout(900)

N_RIDS = 30_000
FEW = 40
TOMBSTONES = 200_000
LAST_RIDS_S = 600.0
GENERATE = pack(Generate(np.array([1], np.int32).tobytes(), SamplingParams(max_new_tokens=9)))


class Toil:
    """A leased worker core; what it sends is dropped, and nothing crosses the codec."""

    def __init__(self, ready: EngineReady = READY) -> None:
        settings = WorkerSettings("w0", "ipc:///r")
        self.core = WorkerCore(settings, "b0" * 16, "ipc:///s", 1, random.Random(3))
        self.now, self.seq = 100.0, 0
        self.core.start(self.now)
        self.core.host([Entry("engine_ready", body=pack(ready))], self.now)
        self.lease()

    def lease(self) -> None:
        for seq in range(self.seq + 1, self.seq + 4):
            self.core.bus([Entry("lease", body=pack(Lease(1, "r", seq)))], self.now)
        self.seq += 1

    def pass_time(self, seconds: float) -> None:
        heartbeat = Entry("engine_beat", body=pack(EngineHeartbeat(0, 0, 0, 0, 0)))
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.core.tick(self.now)
            self.core.host([heartbeat], self.now)
            self.lease()
            self.core.flush(self.now)

    def generate(self, rid: str, client: str, deadline_ms: int) -> None:
        epoch, place = self.core.member.epoch, Placement("default")
        command = Entry("generate", rid, (1, 1), epoch, client, deadline_ms, place, GENERATE)
        self.core.bus([command], self.now)

    def finish(self, rid: str) -> None:
        row = Deltas([rid], [(1, 1)], [0], [1], b"\0" * 4, b"\0" * 4, [0], [(0, "stop")])
        self.core.host([Entry("deltas", body=pack(row))], self.now)


def test_requests_that_ended_and_were_acknowledged_leave_a_tombstone_for_a_while() -> None:
    toil = Toil()
    for n in range(N_RIDS):
        toil.generate(f"c{n}/1", f"c{n}", 10**9)
        toil.finish(f"c{n}/1")
        toil.core.bus([Entry("ack", body=pack(Ack([(f"c{n}/1", (1, 1))])))], toil.now)
        if n % 100 == 0:
            toil.core.flush(toil.now)
            toil.pass_time(0.5)
    assert largest(toil.core)[0] <= TOMBSTONES
    toil.pass_time(LAST_RIDS_S + 10)
    # Deadlines far away of requests that are gone are swept by the next ones.
    assert largest(toil.core)[0] <= 1024 + FEW


def test_commands_that_the_engine_never_ends_are_refused_beyond_a_few() -> None:
    toil = Toil()
    epoch = toil.core.member.epoch
    for n in range(N_RIDS):
        pause = Entry("pause", f"c/{n}@w0", (1, n), epoch, "", 10**9, None, pack(Pause("drain")))
        toil.core.bus([pause], toil.now)
        toil.core.bus([Entry("ack", body=pack(Ack([(f"c/{n}@w0", (1, n))])))], toil.now)
    assert len(toil.core.member.deliveries.running_list()) <= FEW + 64
    assert len(toil.core.member.deliveries.outbox) == 0


def test_requests_beyond_what_the_engine_holds_are_refused() -> None:
    toil = Toil()
    for n in range(N_RIDS // 10):
        toil.generate(f"c/{n}", "c", 10**9)
        toil.core.bus([Entry("ack", body=pack(Ack([(f"c/{n}", (1, 1))])))], toil.now)
    assert len(toil.core.member.deliveries.running_list()) == 4 * READY.slots + 16
