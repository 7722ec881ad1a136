"""Weight updates as transactions."""

from bus.codec import unpack_result
from bus.messages.endings import Done, Problem
from bus.messages.weights import Committed, Prepared, Published, PublishVersion
from tests.unit.router.harness import Bus, SimClient, SimStore, SimWorker

FAILED = Problem("digest_mismatch", "a tensor differs", "failed")


def _publish(client: SimClient, version: int = 1, require: str = "any") -> str:
    body = PublishVersion("default", version, require=require)
    return client.ask("publish_version", body, deadline_s=30)


def _prepare(worker: SimWorker, version: int = 1) -> None:
    worker.end(worker.heard_one("prepare_update"), body=Prepared(version, 1, "shm", 1.0))


def _record(store: SimStore) -> None:
    store.end(store.heard_one("record_commit"), body=Done())


def _commit(worker: SimWorker, version: int = 1) -> None:
    worker.version = version
    worker.end(worker.heard_one("commit_update"), body=Committed(version, 2.5))


def _published(client: SimClient) -> Published:
    (entry,) = client.take("finished")
    body = unpack_result("publish_version", entry)
    assert isinstance(body, Published)
    return body


def test_update_prepares_records_and_commits_in_this_order() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    _publish(client)
    assert store.take("record_commit") == []
    _prepare(worker)
    assert worker.take("commit_update") == []
    _record(store)
    _commit(worker)
    published = _published(client)
    assert [(each.worker, each.is_active) for each in published.workers] == [("w0", True)]
    assert published.workers[0].stall_ms == 2.5
    assert bus.core.status(bus.now).committed == {"default": 1}


def test_committed_worker_serves_the_new_version_at_once() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    client.generate("min:1")
    _publish(client)
    _prepare(worker)
    _record(store)
    _commit(worker)
    assert len(worker.take("generate")) == 1


def test_worker_that_failed_to_prepare_is_quarantined_and_the_others_go_on() -> None:
    bus = Bus()
    store, good, bad = bus.store(), bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    _publish(client)
    _prepare(good)
    bad.end(bad.heard_one("prepare_update"), "failed", FAILED)
    _record(store)
    _commit(good)
    active = {each.worker: each.is_active for each in _published(client).workers}
    assert active == {"w0": True, "w1": False}
    for _ in range(4):
        client.generate()
    assert bad.take("generate") == []


def test_broken_rule_aborts_the_update_and_commits_nothing() -> None:
    bus = Bus()
    store, good, bad = bus.store(), bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    _publish(client, require="all")
    _prepare(good)
    bad.end(bad.heard_one("prepare_update"), "failed", FAILED)
    assert client.ending() == ("failed", "update_failed")
    assert len(good.take("abort_update")) == 1
    assert store.take("record_commit") == []
    assert bus.core.status(bus.now).committed.get("default", 0) == 0


def test_quorum_needs_more_than_half() -> None:
    bus = Bus()
    bus.store()
    good, bad, client = bus.worker("w0"), bus.worker("w1"), bus.client()
    _publish(client, require="quorum")
    _prepare(good)
    bad.end(bad.heard_one("prepare_update"), "failed", FAILED)
    assert client.ending() == ("failed", "update_failed")


def test_silent_worker_does_not_stop_an_update_that_needs_any() -> None:
    bus = Bus()
    store, good, dead = bus.store(), bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    _publish(client)
    _prepare(good)
    dead.is_alive = False
    bus.advance(4)
    _record(store)
    _commit(good)
    problems = {each.worker: each.problem for each in _published(client).workers}
    assert problems == {"w0": "", "w1": "silent during prepare_update"}


def test_store_that_refuses_to_record_aborts_the_update() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    _publish(client)
    _prepare(worker)
    store.end(store.heard_one("record_commit"), "failed", FAILED)
    assert client.ending() == ("failed", "update_failed")
    assert len(worker.take("abort_update")) == 1


def test_version_below_the_committed_one_is_refused() -> None:
    bus = Bus()
    bus.store({"default": 5})
    bus.worker(version=5)
    client = bus.client()
    _publish(client, version=4)
    problem = client.problem()
    assert (problem.code, problem.field) == ("stale_version", "version")


def test_second_update_of_a_policy_is_refused_while_one_runs() -> None:
    bus = Bus()
    bus.store()
    bus.worker()
    client = bus.client()
    _publish(client, version=1)
    _publish(client, version=2)
    assert client.problem().code == "update_in_progress"


def test_same_publish_again_starts_nothing() -> None:
    bus = Bus()
    bus.store()
    worker, client = bus.worker(), bus.client()
    rid = _publish(client)
    client.ask("publish_version", PublishVersion("default", 1), rid=rid)
    assert len(worker.take("prepare_update")) == 1
    assert client.take("refused") == []


def test_update_without_a_store_is_refused() -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    _publish(client)
    bus.advance(12)
    assert client.ending() == ("refused", "no_store")


def test_worker_that_joins_late_catches_up_before_it_serves() -> None:
    bus = Bus()
    bus.store({"default": 3})
    client, late = bus.client(), bus.worker(version=0)
    client.generate(deadline_s=60)
    bus.advance(0.5)
    assert late.take("generate") == []
    _prepare(late, 3)
    _commit(late, 3)
    assert len(late.take("generate")) == 1


def test_catch_up_that_failed_is_tried_again() -> None:
    bus = Bus()
    bus.store({"default": 3})
    late = bus.worker(version=0)
    bus.advance(0.5)
    late.end(late.heard_one("prepare_update"), "failed", FAILED)
    bus.advance(3)
    assert len({each.rid for each in late.take("prepare_update")}) == 1
