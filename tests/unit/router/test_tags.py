"""A trainer's own label on a version: who serves `min-tag:T`, and who may publish under which."""

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.weights import RecordCommit, Settled, SettleVersion
from tests.unit.router.harness import Bus, SimClient, SimStore, SimWorker
from tests.unit.router.update_steps import (
    commit,
    fail_to_prepare,
    prepare,
    publish,
    published,
    record,
)


def _update(
    client: SimClient, store: SimStore, worker: SimWorker, version: int, tag: int | None
) -> None:
    publish(client, version, tag=tag)
    prepare(worker, version)
    record(store)
    commit(worker, version)
    assert published(client).version == version


def _generates(worker: SimWorker) -> list[Entry]:
    return worker.take("generate")


def test_a_request_waits_for_the_version_that_bears_the_label() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(slots=100), bus.client()
    _update(client, store, worker, 1, tag=100)
    early = client.generate("min-tag:200")
    client.generate("min-tag:100")
    (served,) = _generates(worker)
    assert served.place is not None
    assert served.place.versions == "min:1", "workers know numbers only"
    _update(client, store, worker, 2, tag=None)
    assert _generates(worker) == [], "version 2 has no label of its own: it counts as 100"
    _update(client, store, worker, 3, tag=250)
    (late,) = _generates(worker)
    assert late.rid == early
    assert late.place is not None
    assert late.place.versions == "min:3"
    assert bus.core.status(bus.now).tags == {"default": 250}


def test_a_run_of_like_requests_is_judged_by_the_label_too() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(slots=100), bus.client()
    rids = [client.next_rid() for _ in range(5)]
    client.submit_all(rids, versions="min-tag:7")
    assert _generates(worker) == []
    _update(client, store, worker, 1, tag=7)
    more = [client.next_rid() for _ in range(5)]
    client.submit_all(more, versions="min-tag:7")
    assert [entry.rid for entry in _generates(worker)] == rids + more


def test_the_deadline_says_that_no_worker_had_it() -> None:
    bus = Bus()
    client = bus.client()
    bus.worker()
    client.generate("min-tag:7", deadline_s=1)
    bus.advance(2)
    problem = client.problem()
    assert (problem.code, problem.field) == ("version_unavailable", "place.versions")
    assert "min-tag:7" in problem.message


def test_labels_only_grow() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    _update(client, store, worker, 1, tag=100)
    for tag in (100, 99):
        publish(client, 2, tag=tag)
        problem = client.problem()
        assert (problem.code, problem.field) == ("bad_request", "tag")
        assert f"tag {tag} is not above 100, the tag of version 1" in problem.message
    publish(client, 1, tag=100)  # the same publication again, to a router that knows its commit
    prepare(worker)
    commit(worker)
    assert published(client).version == 1


def test_the_label_of_a_publication_that_failed_is_tried_again() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client, 1, tag=100)
    fail_to_prepare(worker)
    assert client.problem().code == "update_failed"
    worker.end(worker.heard_one("abort_update"), body=Done())
    _update(client, store, worker, 2, tag=100)


def test_the_store_is_told_with_the_commit_and_tells_the_next_router() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client, 1, tag=100)
    prepare(worker)
    asked = store.heard_one("record_commit")
    assert unpack(asked) == RecordCommit("default", 1, tag=100)

    later = Bus()
    client, worker = later.client(), later.worker(version=3)
    rid = client.generate("min-tag:100")
    assert _generates(worker) == [], "nobody has told this router of labels yet"
    later.store({"default": 3}, tags={"default": [(1, 50), (3, 100)]})
    assert [entry.rid for entry in _generates(worker)] == [rid]
    publish(client, 4, tag=100)
    assert client.problem().field == "tag"


def test_a_commit_that_was_in_doubt_brings_its_label() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client, 1, tag=100)
    prepare(worker)
    store.heard_one("record_commit")
    store.is_alive = False
    bus.advance(31)
    rid = client.generate("min-tag:100", deadline_s=60)
    again = bus.store()
    bus.advance(1)
    asked = again.heard_one("settle_version")
    assert unpack(asked) == SettleVersion("default", 1)
    again.end(asked, body=Settled(is_committed=True))
    bus.advance(3)
    prepare(worker)
    commit(worker)
    assert [entry.rid for entry in _generates(worker)] == [rid]
