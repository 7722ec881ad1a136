"""A publisher that changes its mind."""

from rolloutbus.bus.wire.codec import unpack_result
from rolloutbus.bus.wire.messages.generation import Abort, Aborted
from rolloutbus.bus.wire.messages.weights import Prepared
from tests.unit.router.harness import Bus, SimClient
from tests.unit.router.update_steps import commit, prepare, publish, published, record


def _abort(client: SimClient, rid: str) -> int:
    """How many were found."""
    asked = client.ask("abort", Abort([rid]))
    (entry,) = (each for each in client.heard if each.rid == asked)
    client.heard.remove(entry)
    body = unpack_result("abort", entry)
    assert isinstance(body, Aborted)
    return body.n_aborted


def test_abort_while_workers_prepare_ends_the_update_everywhere() -> None:
    bus = Bus()
    store, workers, client = bus.store(), [bus.worker("w0"), bus.worker("w1")], bus.client()
    rid = publish(client)
    prepare(workers[0])
    (late,) = workers[1].take("prepare_update")
    assert _abort(client, rid) == 1
    assert client.ending() == ("cancelled", "")
    assert [len(each.take("abort_update")) for each in workers] == [1, 1]
    workers[1].end(late, body=Prepared(1, 64, "shm", 1.0))
    bus.advance(5)
    assert workers[1].take("prepare_update") == []
    assert store.take("record_commit") == []
    assert bus.core.status(bus.now).updates == []


def test_next_version_can_be_published_at_once() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    rid = publish(client)
    worker.take("prepare_update")
    _abort(client, rid)
    client.ending()
    publish(client, 2)
    prepare(worker, 2)
    record(store)
    commit(worker, 2)
    assert published(client).version == 2


def test_abort_after_the_store_was_asked_is_too_late() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    rid = publish(client)
    prepare(worker)
    assert _abort(client, rid) == 0
    record(store)
    commit(worker)
    assert published(client).version == 1


def test_abort_while_the_store_is_away_ends_what_was_not_decided() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    rid = publish(client)
    store.is_alive = False
    bus.advance(4)
    prepare(worker)
    assert _abort(client, rid) == 1
    assert client.ending() == ("cancelled", "")
    assert len(worker.take("abort_update")) == 1


def test_abort_of_a_publication_that_waits_for_members_ends_it() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = publish(client)
    assert _abort(client, rid) == 1
    assert client.ending() == ("cancelled", "")
    bus.store()
    bus.advance(2)
    assert worker.take("prepare_update") == []


def test_nobody_aborts_the_publication_of_another() -> None:
    bus = Bus()
    bus.store()
    bus.worker()
    client, other = bus.client(), bus.client("other")
    rid = publish(client)
    assert _abort(other, rid) == 0
    assert client.take("cancelled") == []


def test_stopping_all_requests_of_a_trainer_leaves_its_publication_alone() -> None:
    bus = Bus()
    bus.store()
    bus.worker()
    client = bus.client()
    publish(client)
    client.ask("abort", Abort(everything=True))
    assert client.take("cancelled") == []


def test_lease_that_is_over_is_not_told_and_the_next_one_is_not_blamed() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)  # it has 30 s
    for _ in range(6):  # a breaker trips at 5 failures
        worker.heard_one("prepare_update")
        worker.lease_no += 1
        worker.seq = 0
        worker.connect()
        worker.hello()
        worker.heartbeat()
        bus.advance(1)
    assert worker.take("abort_update") == []
    prepare(worker)
    record(store)
    commit(worker)
    assert [each.problem for each in published(client).workers] == [""]
    bus.advance(30)
    assert bus.core.status(bus.now).troubled == {}
