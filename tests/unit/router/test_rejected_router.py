"""A router that is told of another one, and claims that a former router's clients bring."""

from bus.codec import pack, unpack
from bus.entry import Entry
from bus.messages.membership import Goodbye, Rejected, Welcome
from router.suspicion import ALONE_AT, POISON_AT, Suspicions
from tests.unit.router.harness import Bus, SimPeer, SimWorker


def _reject(peer: SimPeer, instance: str = "router-z") -> None:
    peer.say(Entry("rejected", body=pack(Rejected(3, instance))))


def test_welcome_says_for_how_long_the_router_has_been_up() -> None:
    bus = Bus(recovered=False)
    bus.advance(2)
    client = bus.client()
    welcome = unpack(client.heard_one("welcome"))
    assert isinstance(welcome, Welcome)
    assert welcome.up_ms == 2000


def test_router_rejected_by_a_member_or_a_client_says_who_told_it() -> None:
    for make in (Bus.client, Bus.worker):
        bus = Bus()
        peer = make(bus)
        assert not bus.core.context.superseded
        _reject(peer)
        assert f"{peer.name} obeys router router-z at epoch 3" in bus.core.context.superseded


def test_a_client_cannot_end_a_router_that_has_members() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    _reject(client)
    assert not bus.core.context.superseded
    assert bus.counters["rejected"] == 1
    client.generate(deadline_s=10)
    assert len(worker.take("generate")) == 1
    _reject(worker)
    assert f"{worker.name} obeys" in bus.core.context.superseded


def test_strangers_and_rejections_meant_for_others_change_nothing() -> None:
    bus = Bus()
    client = bus.client()
    client.connect()
    _reject(client)
    assert len(client.take("dismissed")) == 1
    _reject(bus.client("other"), "router-a")
    assert not bus.core.context.superseded


def _crash(worker: SimWorker) -> None:
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("engine_crashed"))))
    worker.running.clear()
    worker.lease_no += 1
    worker.hello()
    worker.beat()


def test_request_that_crashed_two_engines_before_this_router_began_runs_alone() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=1000, crashes=2)
    client.generate(deadline_s=1000)
    assert len(worker.take("generate")) == 1
    assert bus.counters["isolated"] == 1


def test_poison_dies_no_more_often_because_routers_are_restarted() -> None:
    n_deaths = 0
    while True:
        bus = Bus()  # a new router each time
        worker, client = bus.worker(), bus.client()
        client.generate(deadline_s=1000, crashes=n_deaths)
        commands = worker.take("generate")
        assert commands
        worker.accept(*commands)
        _crash(worker)
        n_deaths += 1
        if client.take("failed"):
            break
        assert len(client.take("lost")) == 1
    assert n_deaths <= ALONE_AT + POISON_AT


def test_claim_counts_only_beyond_what_is_known() -> None:
    suspicions = Suspicions()
    suspicions.charge("c/1", 0.0)
    suspicions.claim("c/1", 1, 0.0)
    assert not suspicions.must_be_alone("c/1")
    suspicions.claim("c/1", 1000, 0.0)
    assert len(suspicions.crashed_alone_on("c/1")) == POISON_AT
