"""A router that is told of another one, and claims that a former router's clients bring."""

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import Goodbye, Hello, Rejected, Welcome
from rolloutbus.router.health.suspicion import ALONE_AT, POISON_AT, Suspicions
from rolloutbus.router.settings import PairSettings
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
    worker.heartbeat()


def test_request_that_crashed_two_engines_before_this_router_began_runs_alone() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = client.generate(deadline_s=1000, resend=True)
    client.generate(deadline_s=1000)
    worker.suspects = [(rid, 2, 0)]
    worker.heartbeat()  # the first one is parked until the router has recovered
    worker.suspects = []
    worker.end(worker.take("generate")[0])
    bus.advance(4)
    assert [each.rid for each in worker.take("generate")] == [rid]
    assert bus.counters["isolated"] == 1


def test_poison_dies_no_more_often_because_routers_are_restarted() -> None:
    n_deaths = 0
    while True:
        bus = Bus()  # a new router each time
        worker, client = bus.worker(), bus.client()
        # Its worker has seen the deaths before: it was alone each time.
        worker.suspects = [("trainer/1", n_deaths, n_deaths)]
        worker.heartbeat()
        client.generate(deadline_s=1000)
        commands = worker.take("generate")
        assert commands
        worker.accept(*commands)
        worker.suspects = []
        _crash(worker)
        n_deaths += 1
        if client.take("failed"):
            break
        assert len(client.take("lost")) == 1
    assert n_deaths <= ALONE_AT + POISON_AT


def test_report_counts_only_beyond_what_is_known() -> None:
    suspicions = Suspicions()
    suspicions.charge("c/1", 0.0, worker="w0")
    suspicions.reported("c/1", "w0", (1, 0), 0.0)
    assert not suspicions.must_be_alone("c/1")
    suspicions.reported("c/1", "w1", (1, 1), 0.0)
    assert suspicions.must_be_alone("c/1")
    assert suspicions.crashed_alone_on("c/1") == ["w1"]


def test_what_a_client_says_of_crashes_gives_it_no_worker_of_its_own() -> None:
    bus = Bus()
    worker, client, other = bus.worker(), bus.client(), bus.client("other")
    rids = [client.generate(deadline_s=1000, crashes=2), other.generate(deadline_s=1000)]
    assert [each.rid for each in worker.take("generate")] == rids
    assert "isolated" not in bus.counters


def test_a_standby_is_no_client_and_shown_for_as_long_as_it_lives() -> None:
    bus = Bus(pair=PairSettings("ipc:///r/other", is_first=True))
    bus.client()
    assert bus.core.status(bus.now).standby == "missing"
    standby = SimPeer(bus, "router-b0")
    standby.say(Entry("hello", body=pack(Hello("router", standby.name, "b" * 32))))
    assert len(standby.take("welcome")) == 1
    status = bus.core.status(bus.now)
    assert (status.standby, status.n_clients) == ("ready", 1)
    standby.is_alive = False
    bus.advance(2.0)
    assert bus.core.status(bus.now).standby == "missing"
    assert Bus().core.status(1000.0).standby == ""


def test_a_router_begins_with_the_epoch_that_it_is_given() -> None:
    bus = Bus(epoch=9)
    welcome = unpack(bus.client().heard_one("welcome"))
    assert isinstance(welcome, Welcome)
    assert welcome.router_epoch == 9
