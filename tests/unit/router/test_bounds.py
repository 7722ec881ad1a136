"""Whatever names peers make up, the router remembers a bounded number of them, or for a while."""

from random import Random

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Peer, Placement
from rolloutbus.bus.wire.messages.control import FlushCache
from rolloutbus.bus.wire.messages.endings import Accepted
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import Goodbye, Heartbeat, Hello, WorkerFacts
from rolloutbus.bus.wire.messages.weights import PublishVersion
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Received, Ticked
from rolloutbus.router.members.member_commands import MAX_SHARES
from rolloutbus.router.requests.lane import REMEMBERED, Passes
from rolloutbus.router.settings import RouterSettings
from tests.unit.sizes import largest, sizes

pytestmark = pytest.mark.timeout(900)

N_NAMES = 12_000
FEW = 40
"""Things that are there without anybody, such as the kinds of commands."""
BOOT = "b" * 32


class Crowd:
    """A recovered router core and a great many peers; nothing crosses the codec."""

    def __init__(self) -> None:
        settings = RouterSettings("ipc:///r/front", "ipc:///r/back", queue_limit=1000)
        self.core = RouterCore(settings, "router-a", Random(1))
        self.now = 1000.0
        self.n_peers = 0
        self.core.handle(Ticked(), self.now)
        self.pass_time(4.0)

    def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self.core.handle(Ticked(), self.now)

    def peer(self) -> Peer:
        self.n_peers += 1
        return Peer(self.n_peers.to_bytes(16, "big"))

    def client(self, name: str) -> Peer:
        peer = self.peer()
        self.say(peer, Entry("hello", body=pack(Hello("client", name, BOOT))))
        return peer

    def worker(self, name: str, policy: str = "default", lease_no: int = 1) -> tuple[Peer, str]:
        peer, epoch = self.peer(), f"{BOOT}.{lease_no}"
        facts = WorkerFacts(policy, "ipc:///s", 4, 4096, 100, "fake", ["generate"])
        hello = Hello("worker", name, BOOT, epoch, worker=facts)
        self.say(peer, Entry("hello", body=pack(hello)), Entry("beat", "", epoch=epoch, body=BEAT))
        return peer, epoch

    def say(self, peer: Peer, *entries: Entry) -> None:
        self.core.handle(Received(peer, list(entries)), self.now)

    def generate(self, peer: Peer, rid: str, policy: str = "default") -> None:
        place = Placement(policy, cost=1)
        self.say(peer, Entry("generate", rid, deadline_ms=60_000, place=place, body=NO_BODY))


BEAT = pack(Heartbeat(1))


def test_clients_that_ask_and_vanish_leave_nothing_behind() -> None:
    crowd = Crowd()
    for n in range(N_NAMES):
        crowd.generate(crowd.client(f"c{n}"), f"c{n}/1", f"p{n}")
    assert len(crowd.core.table) <= crowd.core.context.settings.queue_limit
    crowd.pass_time(31)
    assert len(crowd.core.table) == 0
    crowd.pass_time(31)
    rest = {path.rpartition(".")[2] for path, size in sizes(crowd.core).items() if size > FEW}
    assert rest <= {"_passed", "_shares"}  # what saves time once it was looked at; bounded, too
    assert largest(crowd.core)[0] <= 10_000


def test_workers_that_come_with_policies_of_their_own_and_fail_leave_nothing_behind() -> None:
    crowd = Crowd()
    for n in range(N_NAMES):
        peer, epoch = crowd.worker(f"w{n}", f"p{n}")
        goodbye = pack(Goodbye("engine_failed: no luck"))
        crowd.say(peer, Entry("goodbye", epoch=epoch, body=goodbye))
    assert largest(crowd.core)[0] <= 10_000
    assert len(crowd.core.status(crowd.now).troubled) <= 10_000
    crowd.pass_time(610, step_s=10)
    assert largest(crowd.core)[0] <= FEW


def test_work_of_clients_that_never_come_back_is_stopped_and_forgotten() -> None:
    crowd = Crowd()
    peer, epoch = crowd.worker("w0")
    n_per_beat = N_NAMES // 100
    for n in range(100):
        running = [
            (f"gone{n}/{i}", (1, n * n_per_beat + i + 1), f"gone{n}") for i in range(n_per_beat)
        ]
        crowd.say(
            peer, Entry("beat", "", epoch=epoch, body=pack(Heartbeat(n + 2, running=running)))
        )
        # Its endings reach nobody either.
        endings = [
            Entry("finished", rid, attempt, epoch, client) for rid, attempt, client in running
        ]
        crowd.say(peer, *endings)
        crowd.pass_time(1)
    for n in range(62):
        crowd.say(peer, Entry("beat", "", epoch=epoch, body=pack(Heartbeat(n + 200))))
        crowd.pass_time(0.5)
    assert crowd.core.context.members.named("w0") is not None
    assert len(crowd.core.table) == 0
    assert largest(crowd.core)[0] <= FEW


def test_suspects_are_bounded_whoever_they_are() -> None:
    crowd = Crowd()
    n_per_crash = N_NAMES // 100
    for n in range(100):
        peer, epoch = crowd.worker("w0", lease_no=n + 1)
        running = [(f"c/{n * n_per_crash + i}", (1, i + 1), "c") for i in range(n_per_crash)]
        crowd.say(
            peer, Entry("beat", "", epoch=epoch, body=pack(Heartbeat(n + 2, running=running)))
        )
        crowd.say(peer, Entry("goodbye", epoch=epoch, body=pack(Goodbye("engine_crashed"))))
    assert largest(crowd.core)[0] <= 10_000
    crowd.pass_time(610, step_s=10)
    assert largest(crowd.core)[0] <= FEW


def test_commands_to_a_member_that_never_answers_are_bounded() -> None:
    crowd = Crowd()
    client = crowd.client("c")
    peer, epoch = crowd.worker("w0")
    flush = pack(FlushCache())
    for n in range(MAX_SHARES + 1000):
        crowd.say(
            client, Entry("flush_cache", f"c/{n}", (0, 0), "", "worker:w0", 10**9, None, flush)
        )
    assert largest(crowd.core)[0] <= MAX_SHARES
    crowd.say(peer, Entry("goodbye", epoch=epoch, body=pack(Goodbye("left"))))
    assert largest(crowd.core)[0] <= 10_000
    crowd.pass_time(61)
    assert largest(crowd.core)[0] <= FEW


def test_publications_of_policies_that_nobody_serves_are_bounded() -> None:
    crowd = Crowd()
    client = crowd.client("c")
    for n in range(N_NAMES):
        body = pack(PublishVersion(f"p{n}", 1))
        crowd.say(client, Entry("publish_version", f"c/{n}", deadline_ms=10**9, body=body))
    assert largest(crowd.core)[0] <= 10_000


def test_requests_that_are_given_up_behind_one_that_waits_leave_its_lane() -> None:
    crowd = Crowd()
    waiting = crowd.client("first")
    crowd.generate(waiting, "first/1")
    for n in range(N_NAMES):
        name = f"c{n % 50}"
        if n < 50:
            crowd.client(name)
        peer = crowd.core.context.clients.named(name)
        assert peer is not None
        crowd.generate(peer.peer, f"{name}/{n}")
        crowd.say(
            peer.peer,
            Entry(
                "abort",
                f"{name}/{n + N_NAMES}",
                deadline_ms=1000,
                body=pack(Abort([f"{name}/{n}"])),
            ),
        )
    assert len(crowd.core.table.waiting) == 1
    assert largest(crowd.core)[0] <= 1000


def test_clients_that_start_one_request_each_do_not_fill_the_turns() -> None:
    turns = Passes({})
    for n in range(N_NAMES):
        turns.charge(f"c{n}", 10)
    assert len(turns) <= REMEMBERED
    turns.charge("late", 1)
    assert turns.of("late") > 0


def test_accepted_lists_of_unknown_requests_are_not_kept() -> None:
    crowd = Crowd()
    peer, epoch = crowd.worker("w0")
    for n in range(100):
        items = [(f"c/{n * 1000 + i}", (1, 1)) for i in range(N_NAMES // 100)]
        crowd.say(peer, Entry("accepted", epoch=epoch, body=pack(Accepted(items))))
    assert largest(crowd.core)[0] <= FEW
