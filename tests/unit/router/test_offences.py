"""Repeated offenders are dismissed; a claim at the edge of a type is harmless."""

# pyright: reportPrivateUsage=false
# Nothing shows from outside how many connections are remembered.

from typing import Any

import msgspec
import pytest

from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.limits import MAX_DEADLINE_MS, MAX_ROUTER_EPOCH
from rolloutbus.router.events import Malformed, Ticked
from rolloutbus.router.members.authority import OFFENCES, REMEMBERED, SHUNNED_S, WINDOW_S
from tests.unit.router.harness import Bus, SimClient

PEER = Peer(b"\x01" * 16)
BAD = Entry("pause", "trainer/1", route="fleet", body=msgspec.Raw(b"\x81\xa4mode\x05"))


def offend(client: SimClient, times: int) -> None:
    for _ in range(times):
        client.say(BAD)


def test_a_peer_is_told_each_time_and_dismissed_at_the_tenth() -> None:
    bus = Bus()
    client = bus.client()
    offend(client, OFFENCES - 1)
    assert [each.kind for each in client.take("refused", "dismissed")] == ["refused"] * 9
    offend(client, 1)
    assert client.take_body("dismissed").code == "protocol"
    assert bus.counters["offenders_dismissed"] == 1
    assert "trainer" not in [client.name for client in bus.core.context.clients]


def test_what_a_dismissed_peer_goes_on_to_say_is_not_read() -> None:
    bus = Bus()
    client = bus.client()
    offend(client, OFFENCES)
    client.heard.clear()
    client.hello()
    client.heartbeat()
    assert client.heard == []
    assert bus.counters["shunned"] == 2
    assert client.peer not in bus.reachable, "what is not answered must not be remembered"
    client.is_alive = False
    bus.advance(SHUNNED_S + 1)
    client.hello()
    assert [each.kind for each in client.take("welcome")] == ["welcome"]


def test_a_fresh_connection_is_a_fresh_start() -> None:
    bus = Bus()
    client = bus.client()
    offend(client, OFFENCES)
    client.connect()
    client.hello()
    assert len(client.take("welcome")) == 2  # the first one is of its old connection


def test_offences_that_are_far_apart_are_forgiven() -> None:
    bus = Bus()
    client = bus.client()
    for _ in range(3):
        offend(client, OFFENCES - 1)
        bus.advance(WINDOW_S + 1)
    assert client.take("dismissed") == []


def test_messages_that_cannot_be_decoded_count_too() -> None:
    bus = Bus()
    client = bus.client()
    for _ in range(OFFENCES):
        bus.apply(bus.core.handle(Malformed(client.peer), bus.now))
    assert client.take_body("dismissed").code == "protocol"


def test_a_member_that_offends_loses_its_lease_and_its_work() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    rid = client.generate()
    worker.accept(*worker.take("generate"))
    for _ in range(OFFENCES):
        worker.say(Entry("beat", epoch=worker.epoch, body=msgspec.Raw(b"\x80")))
    assert worker.take_body("dismissed").code == "protocol"
    assert [item[0] for item in client.take_body("lost").items] == [rid]
    assert bus.core.context.members.workers() == []


def test_the_memory_of_offences_is_bounded() -> None:
    core = Bus().core
    offences = core._offences
    for number in range(3 * REMEMBERED):
        peer = Peer(number.to_bytes(16, "big"))
        for _ in range(OFFENCES + 1):
            core.handle(Malformed(peer), 5000.0)
    assert len(offences.shunned) == REMEMBERED
    core.handle(Ticked(), 5000.0 + SHUNNED_S + 1)
    assert not offences.shunned
    assert offences.offended(PEER, 5000.0 + SHUNNED_S + 1) is False


def hello(**fields: Any) -> Entry:  # noqa: ANN401 - fields of Hello, right or wrong
    body = {"role": "client", "name": "other", "boot": "0" * 32, **fields}
    return Entry("hello", body=msgspec.Raw(msgspec.msgpack.encode(body)))


@pytest.mark.parametrize(
    "fields",
    [
        {"router_epoch": MAX_ROUTER_EPOCH + 1},
        {"router_epoch": -1},
        {"name": "x" * 65},
        {"epoch": "0." + "9" * 5000},
        {"extra": 1},
        {"role": "king"},
        {"role": "client", "store": {"bulk": "", "committed": {"default": 9}}},
    ],
)
def test_a_hello_beyond_the_limits_is_turned_away(fields: dict[str, Any]) -> None:
    bus = Bus()
    client = bus.client()
    client.connect()
    client.say(hello(**fields))
    assert client.take_body("dismissed").code == "bad-hello"
    assert bus.core.context.committed_of("default") == 0


def test_the_highest_epoch_that_a_peer_may_claim_can_still_be_said() -> None:
    bus = Bus()
    client = bus.client()
    client.connect()
    client.say(hello(router_epoch=MAX_ROUTER_EPOCH, router_instance="elsewhere"))
    other = bus.client("third")
    other.heartbeat()
    assert other.take_body("lease").router_epoch == MAX_ROUTER_EPOCH


def test_one_connection_cannot_be_many_clients() -> None:
    bus = Bus()
    client = bus.client()
    client.say(hello(name="second"))
    assert client.take_body("dismissed").code == "bad-hello"
    assert [each.name for each in bus.core.context.clients] == ["trainer"]


def test_the_longest_deadline_reaches_the_worker() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    client.generate(deadline_s=MAX_DEADLINE_MS / 1000)
    (command,) = worker.take("generate")
    assert 0 < command.deadline_ms <= MAX_DEADLINE_MS


def test_a_publication_under_the_rid_of_another_client_is_refused() -> None:
    bus = Bus()
    thief = bus.client("thief")
    body = msgspec.Raw(msgspec.msgpack.encode({"policy": "default", "version": 1}))
    thief.say(Entry("publish_version", "trainer/1", deadline_ms=500, body=body))
    assert (thief.problem().field, bus.core.context.members.store()) == ("rid", None)
