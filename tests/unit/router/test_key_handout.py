"""What a router tells members of other hosts: the allow-list, and what nobody can reach."""

from typing import Any

import msgspec
import pytest

from rolloutbus.bus.security.principals import Principal, handed
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import (
    Dismissed,
    HandedKeys,
    Heartbeat,
    Hello,
    StoreFacts,
    WorkerFacts,
)
from rolloutbus.router.events import KeysChanged, Received
from tests.unit.router.harness import Bus, SimPeer

KEY, LIST = (
    "ee" * 32,
    [Principal("aa" * 32, "ann", "trainer"), Principal("ee" * 32, "w0", "worker")],
)
LONGER = [*LIST, Principal("bb" * 32, "bob", "client")]
BOOT = "c" * 32


class FarWorker(SimPeer):
    """A worker of another host."""

    def __init__(
        self, bus: Bus, *, protocol: tuple[int, int] = (1, 3), host: str = "10.0.0.2"
    ) -> None:
        super().__init__(bus, "w0")
        self.protocol, self.host = protocol, host
        self.seq = 0
        self.keys = ""

    def hello(self, stream: str = f"tcp://10.0.0.2:5000#{KEY}", bulk: str = "") -> None:
        facts = WorkerFacts("default", stream, 4, 4096, 100, "fake", ["generate"], bulk=bulk)
        self.introduce(Hello("worker", "w0", BOOT, f"{BOOT}.1", worker=facts), LIST[1])

    def introduce(self, hello: Hello, principal: Principal) -> None:
        hello = msgspec.structs.replace(hello, protocol=self.protocol)
        self.bus.reachable.add(self.peer)
        event = Received(self.peer, [Entry("hello", body=pack(hello))], principal, self.host)
        self.bus.apply(self.bus.core.handle(event, self.bus.now))

    def heartbeat(self) -> None:
        self.seq += 1
        self.say(Entry("beat", epoch=f"{BOOT}.1", body=pack(Heartbeat(self.seq, keys=self.keys))))

    def dismissal(self) -> Dismissed:
        return self.take_body("dismissed")


@pytest.fixture
def bus() -> Bus:
    bus = Bus()
    bus.apply(bus.core.handle(KeysChanged(LIST), bus.now))
    return bus


def test_a_member_is_handed_the_list_with_its_welcome_and_at_each_change(bus: Bus) -> None:
    worker = FarWorker(bus)
    worker.hello()
    assert [each.kind for each in worker.heard[:2]] == ["welcome", "allow_list"]
    assert worker.take_body("allow_list") == handed(LIST)
    bus.apply(bus.core.handle(KeysChanged(LONGER), bus.now))
    assert worker.take_body("allow_list") == handed(LONGER)


def test_a_member_that_has_another_list_is_handed_it_again_and_one_that_has_it_is_not(
    bus: Bus,
) -> None:
    worker = FarWorker(bus)
    worker.hello()
    worker.heartbeat()  # sent with the hello
    handed_over: HandedKeys = worker.take_body("allow_list")
    worker.keys = handed_over.stamp
    worker.heartbeat()
    assert not worker.take("allow_list")
    worker.keys = "another"
    worker.heartbeat()
    assert worker.take_body("allow_list") == handed_over


def test_a_list_on_its_way_is_not_sent_again_with_each_heartbeat(bus: Bus) -> None:
    worker = FarWorker(bus)
    worker.hello()
    n_heartbeats = 60
    for _ in range(n_heartbeats):  # of half a minute, all without the list
        bus.advance(0.5)
        worker.heartbeat()
    handed_over = worker.take("allow_list")
    leases = bus.core.context.settings.leases
    assert 1 < len(handed_over) <= 4 + n_heartbeats * 0.5 / leases.resend_max_s
    bus.apply(bus.core.handle(KeysChanged(LONGER), bus.now))
    assert worker.take_body("allow_list") == handed(LONGER)


def test_clients_and_members_of_an_older_protocol_are_handed_nothing(bus: Bus) -> None:
    worker = FarWorker(bus, protocol=(1, 2))
    worker.hello()
    client = bus.client()
    bus.apply(bus.core.handle(KeysChanged(LONGER), bus.now))
    assert not worker.take("allow_list")
    assert not client.take("allow_list")


def test_a_router_without_keys_hands_nothing_over() -> None:
    bus = Bus()
    worker = FarWorker(bus)
    worker.hello()
    worker.heartbeat()
    worker.heartbeat()
    assert not worker.take("allow_list")


@pytest.mark.parametrize(
    "served",
    [
        {"stream": f"tcp://127.0.0.1:5000#{KEY}"},
        {"stream": f"ipc:///run/w0#{KEY}"},
        {"bulk": f"tcp://[::1]:5001#{KEY}"},
        {"stream": f"http://nonsense#{KEY}"},
    ],
)
def test_a_worker_of_another_host_that_serves_its_own_host_only_is_refused(
    bus: Bus, served: dict[str, Any]
) -> None:
    worker = FarWorker(bus)
    worker.hello(**served)
    refused = worker.dismissal()
    assert refused.code == "unreachable"
    if "nonsense" not in str(served):
        assert "10.0.0.2" in refused.message
        assert "--advertise" in refused.message


def test_the_same_of_a_store(bus: Bus) -> None:
    store = FarWorker(bus)
    facts = StoreFacts(f"tcp://127.0.0.1:9#{KEY}")
    principal = Principal(KEY, "store", "store")
    store.introduce(Hello("store", "store", BOOT, f"{BOOT}.1", store=facts), principal)
    assert store.dismissal().code == "unreachable"


def test_a_worker_of_the_routers_own_host_may_serve_that_host_only(bus: Bus) -> None:
    worker = FarWorker(bus, host="")
    worker.hello(stream=f"tcp://127.0.0.1:5000#{KEY}")
    assert worker.take("welcome")
