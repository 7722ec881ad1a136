"""Who is on the bus, for how long, and what clients are told."""

import pytest

from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Members,
    Welcome,
    WorkerFacts,
)
from rolloutbus.router.events import Ticked
from tests.unit.router.harness import Bus, SimPeer


def _dismissal(peer: SimPeer) -> str:
    body = peer.take_body("dismissed")
    assert isinstance(body, Dismissed)
    return body.code


def test_hello_is_welcomed_and_a_client_is_told_the_workers() -> None:
    bus = Bus()
    bus.worker()
    welcome = bus.client().take_body("welcome")
    assert isinstance(welcome, Welcome)
    assert [(each.name, each.state) for each in welcome.members] == [("w0", "ready")]


def test_clients_hear_when_a_worker_comes_and_goes() -> None:
    bus = Bus()
    client = bus.client()
    worker = bus.worker()
    members = client.take_body("members")
    assert isinstance(members, Members)
    assert [each.name for each in members.members] == ["w0"]
    bus.advance(0.5)
    client.take("members")
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("done"))))
    bus.advance(0.25)
    members = client.take_body("members")
    assert isinstance(members, Members)
    assert members.members == []


def test_clients_are_not_told_again_for_each_of_many_changes() -> None:
    bus = Bus()
    client = bus.client()
    for number in range(20):
        bus.worker(f"w{number}")
    assert len(client.take("members")) == 1
    bus.advance(0.25)
    members = client.take_body("members")
    assert isinstance(members, Members)
    assert len(members.members) == 20


def test_every_heartbeat_is_answered_with_its_number() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    lease = worker.take_body("lease")
    assert isinstance(lease, Lease)
    assert lease.seq == worker.seq
    client.take("lease")
    client.say(Entry("client_beat", body=pack(ClientHeartbeat(41))))
    lease = client.take_body("lease")
    assert isinstance(lease, Lease)
    assert lease.seq == 41


def test_a_short_lease_is_no_longer_after_the_routers_own_pause() -> None:
    """The grace of that pause is longer than this lease; a heartbeat after it begins a lease."""
    leases = LeaseSettings(heartbeat_s=0.1, lease_s=1.0, holder_s=0.8, silence_s=0.3)
    bus = Bus(leases=leases)
    worker = bus.worker()
    bus.freeze(1.5)
    bus.apply(bus.core.handle(Ticked(), bus.now))
    worker.heartbeat()
    worker.is_alive = False
    bus.advance(0.75)
    assert any(bus.core.context.members)
    bus.advance(0.25)
    assert not any(bus.core.context.members)


def test_leases_that_begin_at_different_times_end_at_their_own() -> None:
    bus = Bus()
    members = bus.core.context.members
    ends_at: dict[str, float] = {}
    for number in range(4):
        bus.worker(f"w{number}").is_alive = False
        ends_at[f"w{number}"] = bus.now + 3
        bus.advance(0.5)
    while any(members):
        assert {each.name for each in members.workers()} == {
            name for name, at in ends_at.items() if at > bus.now
        }
        assert members.expired(bus.now + 9) == list(members)  # who asks changes nothing
        bus.advance(0.25)
    assert bus.now == pytest.approx(max(ends_at.values()))


def test_lease_ends_three_seconds_after_the_last_heartbeat() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.is_alive = False
    bus.advance(2.75)
    assert len(bus.core.status(bus.now).workers) == 1
    bus.advance(0.5)
    assert bus.core.status(bus.now).workers == []


def test_heartbeat_of_another_epoch_or_an_old_one_renews_nothing() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.take("lease")
    worker.lease_no += 1
    worker.heartbeat()
    worker.lease_no -= 1
    worker.seq -= 2
    worker.heartbeat()
    assert worker.take("lease") == []
    assert bus.counters["stale_heartbeats"] == 2


def test_same_epoch_on_a_fresh_connection_loses_nothing() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=60)
    (command,) = worker.take("generate")
    worker.accept(command)
    worker.connect()
    worker.hello()
    worker.end(command)
    assert client.take("lost") == []
    assert len(client.take("finished")) == 1


def test_new_epoch_of_a_worker_loses_what_the_old_one_ran() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=60)
    worker.accept(*worker.take("generate"))
    worker.connect()
    worker.lease_no += 1
    worker.hello()
    assert len(client.take("lost")) == 1


def test_newer_process_with_the_same_name_replaces_the_older() -> None:
    bus = Bus()
    old = bus.worker()
    bus.worker()
    assert _dismissal(old) == "replaced"


def test_unknown_peer_is_told_to_say_hello_again() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.connect()
    worker.heartbeat()
    assert _dismissal(worker) == "unknown-peer"


def test_whatever_follows_a_goodbye_in_one_batch_has_no_effect() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.take("lease")
    bye = Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye()))
    worker.say(bye, Entry("beat", epoch=worker.epoch, body=pack(Heartbeat(9))))
    assert worker.take("lease") == []
    assert bus.core.status(bus.now).workers == []


def test_hello_and_first_request_may_share_a_batch() -> None:
    bus = Bus()
    client = bus.client()
    client.connect()
    hello = Entry("hello", body=pack(Hello("client", "late", "d" * 32)))
    client.say(hello, Entry("client_beat", body=pack(ClientHeartbeat(1))))
    assert len(client.take("lease")) == 1


@pytest.mark.parametrize("protocol", [(4, 5), (0, 0), (2, 1)])
def test_protocol_that_is_not_spoken_is_dismissed(protocol: tuple[int, int]) -> None:
    bus = Bus()
    client = bus.client()
    client.connect()
    client.say(Entry("hello", body=pack(Hello("client", "new", "d" * 32, protocol=protocol))))
    assert _dismissal(client) == "protocol"


@pytest.mark.parametrize(("protocol", "chosen"), [((1, 2), 1), ((1, 3), 1), ((3, 4), 3)])
def test_the_releases_before_and_after_this_one_are_welcome(
    protocol: tuple[int, int], chosen: int
) -> None:
    bus = Bus()
    client = bus.client()
    client.connect()
    client.heard.clear()
    client.say(Entry("hello", body=pack(Hello("client", "new", "d" * 32, protocol=protocol))))
    welcome = client.take_body("welcome")
    assert isinstance(welcome, Welcome)
    assert welcome.protocol == chosen


def test_bad_hello_is_dismissed() -> None:
    bus = Bus()
    client = bus.client()
    client.say(Entry("hello", body=pack(Hello("client", "a name", "d" * 32))))
    assert _dismissal(client) == "bad-hello"
    client.say(Entry("hello", body=pack(Hello("worker", "w1", "d" * 32, "e.1"))))
    assert _dismissal(client) == "bad-hello"


def test_malformed_body_is_counted_and_hurts_nobody() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.say(Entry("beat", epoch=worker.epoch))
    assert bus.counters["malformed"] == 1
    assert len(bus.core.status(bus.now).workers) == 1


def test_router_that_was_frozen_judges_nobody_before_they_could_speak() -> None:
    bus = Bus()
    worker = bus.worker()
    bus.freeze(10)
    bus.apply(bus.core.handle(Ticked(), bus.now))
    assert len(bus.core.status(bus.now).workers) == 1
    bus.advance(3)
    assert len(bus.core.status(bus.now).workers) == 1
    assert bus.counters["own_pauses"] == 1
    worker.is_alive = False
    bus.advance(4)
    assert bus.core.status(bus.now).workers == []


def test_joining_worker_gets_no_requests_before_its_first_heartbeat() -> None:
    bus = Bus()
    client, peer = bus.client(), bus.client("peer")
    peer.connect()
    facts = WorkerFacts("default", "ipc:///s", 4, 4096, 100, "fake", [])
    peer.say(Entry("hello", body=pack(Hello("worker", "w9", "d" * 32, "d.1", worker=facts))))
    client.generate()
    assert peer.take("generate") == []


def test_new_epoch_on_the_same_connection_is_welcomed() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.take("welcome")
    worker.lease_no += 1
    worker.hello()
    assert len(worker.take("welcome")) == 1


def test_replaced_process_that_says_goodbye_does_not_take_its_successor_along() -> None:
    bus = Bus()
    old, new = bus.worker(), bus.worker()
    old.say(Entry("goodbye", epoch=old.epoch, body=pack(Goodbye())))
    new.take("lease")
    new.heartbeat()
    assert len(new.take("lease")) == 1


def test_router_that_was_frozen_for_long_keeps_its_clients_work() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=600)
    worker.accept(worker.heard_one("generate"))
    bus.freeze(120)
    bus.apply(bus.core.handle(Ticked(), bus.now))
    bus.advance(1)
    assert worker.take("fenced") == []


def test_store_that_joins_late_makes_workers_stale_that_are_behind_its_record() -> None:
    bus = Bus()
    worker, client = bus.worker(version=2), bus.client()
    bus.store({"default": 3})
    client.generate()
    assert worker.take("generate") == []


def test_commit_learned_from_one_worker_makes_the_others_stale() -> None:
    bus = Bus(recovered=False)
    client, old = bus.client(), bus.worker("w0", version=5)
    new = bus.worker("w1", version=6)
    for _ in range(4):
        client.generate()
    assert old.take("generate") == []
    assert len(new.take("generate")) == 4
