"""What the store was asked to record and did not answer: nobody is told that it failed."""

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.weights import (
    PublishVersion,
    Reserved,
    ReserveVersion,
    Settled,
    SettleVersion,
    Tensor,
)
from tests.unit.router.harness import Bus, SimClient, SimStore, SimWorker
from tests.unit.router.update_steps import FAILED, commit, prepare, progress, publish

RESERVE = ReserveVersion("default", [Tensor("w", "F32", (1,), 0, 4)])


def _asked_and_lost(bus: Bus) -> tuple[SimStore, SimWorker, SimClient]:
    """A publication whose store dies with the question whether to record it."""
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)
    prepare(worker)
    store.heard_one("record_commit")
    store.is_alive = False
    return store, worker, client


def test_a_store_that_does_not_come_back_leaves_the_outcome_unknown() -> None:
    bus = Bus()
    _, worker, client = _asked_and_lost(bus)
    bus.advance(31)
    problem = client.problem()
    assert (problem.code, problem.outcome) == ("update_unknown", "unknown")
    assert progress(client)[-1].phase == "unknown"
    assert worker.heard_one("abort_update")


def test_a_store_that_was_never_asked_leaves_no_doubt() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)
    store.is_alive = False
    bus.advance(4)
    prepare(worker)
    bus.advance(31)
    problem = client.problem()
    assert (problem.code, problem.outcome) == ("update_failed", "failed")


def test_a_store_that_says_no_leaves_no_doubt() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)
    prepare(worker)
    store.end(store.heard_one("record_commit"), "failed", FAILED)
    assert client.ending() == ("failed", "update_failed")


def test_the_router_finds_out_and_brings_what_was_committed_to_the_workers() -> None:
    bus = Bus()
    _, worker, client = _asked_and_lost(bus)
    bus.advance(31)
    client.take("failed")
    worker.end(worker.heard_one("abort_update"), body=Done())
    store = bus.store()
    bus.advance(0.5)
    ask = store.heard_one("settle_version")
    assert unpack(ask) == SettleVersion("default", 1)
    store.end(ask, body=Settled(is_committed=True))
    assert bus.core.status(bus.now).committed == {"default": 1}
    bus.advance(0.5)
    prepare(worker)
    commit(worker)
    assert bus.core.status(bus.now).workers[0].version == 1


def test_what_was_not_recorded_is_left_alone() -> None:
    bus = Bus()
    _, worker, client = _asked_and_lost(bus)
    bus.advance(31)
    client.take("failed")
    store = bus.store()
    bus.advance(0.5)
    store.end(store.heard_one("settle_version"), body=Settled(is_committed=False))
    bus.advance(3)
    assert store.take("settle_version") == []
    assert bus.core.status(bus.now).committed.get("default", 0) == 0
    assert worker.take("prepare_update") == []


def _reserved(bus: Bus, store: SimStore, client: SimClient) -> None:
    client.ask("reserve_version", RESERVE, "store", deadline_s=60)
    store.end(store.heard_one("reserve_version"), body=Reserved(1, "host", "segment", 4))
    bus.advance(0.25)


def test_versions_of_a_client_that_is_gone_are_given_back() -> None:
    bus = Bus()
    store, client = bus.store(), bus.client()
    _reserved(bus, store, client)
    client.is_alive = False
    bus.advance(20)
    assert store.take("settle_version") == []
    bus.advance(12)
    ask = store.heard_one("settle_version")
    assert unpack(ask) == SettleVersion("default", 1)
    store.end(ask, body=Settled(is_committed=False))


def test_what_is_being_published_goes_on_without_its_client() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    _reserved(bus, store, client)
    client.ask("publish_version", PublishVersion("default", 1), deadline_s=90)
    client.is_alive = False
    bus.advance(32)
    assert store.take("settle_version") == []
    assert worker.take("prepare_update") != []
