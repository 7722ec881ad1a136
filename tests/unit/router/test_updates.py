"""Weight updates as transactions."""

import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.weights import Offer, Prepared, PrepareUpdate, PublishVersion
from tests.unit.router.harness import Bus, SimClient, SimStore, SimWorker
from tests.unit.router.update_steps import (
    FAILED,
    commit,
    fail_to_prepare,
    prepare,
    publish,
    published,
    record,
)


def _one_of_two_fails(
    bus: Bus, require: str = "any"
) -> tuple[SimStore, SimWorker, SimWorker, SimClient]:
    """Publish to two workers, of which the second fails to prepare."""
    store, good, bad, client = bus.store(), bus.worker("w0"), bus.worker("w1"), bus.client()
    publish(client, require=require)
    prepare(good)
    fail_to_prepare(bad)
    return store, good, bad, client


def test_update_prepares_records_and_commits_in_this_order() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)
    assert store.take("record_commit") == []
    prepare(worker)
    assert worker.take("commit_update") == []
    record(store)
    commit(worker)
    result = published(client)
    assert [(each.worker, each.is_active) for each in result.workers] == [("w0", True)]
    assert result.workers[0].stall_ms == 2.5
    assert bus.core.status(bus.now).committed == {"default": 1}


def test_committed_worker_serves_the_new_version_at_once() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    client.generate("min:1")
    publish(client)
    prepare(worker)
    record(store)
    commit(worker)
    assert len(worker.take("generate")) == 1


def test_worker_whose_swap_is_slow_gets_nothing_once_another_has_the_new_version() -> None:
    bus = Bus()
    store, quick, slow, client = bus.store(), bus.worker("w0"), bus.worker("w1"), bus.client()
    publish(client)
    prepare(quick)
    prepare(slow)
    record(store)
    commit(quick)
    client.generate("any")
    client.generate("any")
    assert len(quick.take("generate")) == 2
    assert slow.take("generate") == []
    client.generate("exact:0")
    bus.advance(0.25)
    assert client.ending() == ("refused", "version_unavailable")
    commit(slow)
    assert published(client).version == 1


def test_worker_that_failed_to_prepare_is_quarantined_and_the_others_go_on() -> None:
    bus = Bus()
    store, good, bad, client = _one_of_two_fails(bus)
    record(store)
    commit(good)
    active = {each.worker: each.is_active for each in published(client).workers}
    assert active == {"w0": True, "w1": False}
    for _ in range(4):
        client.generate()
    assert bad.take("generate") == []


def test_broken_rule_aborts_the_update_and_commits_nothing() -> None:
    bus = Bus()
    store, good, _, client = _one_of_two_fails(bus, "all")
    assert client.ending() == ("failed", "update_failed")
    assert len(good.take("abort_update")) == 1
    assert store.take("record_commit") == []
    assert bus.core.status(bus.now).committed.get("default", 0) == 0


def test_quorum_needs_more_than_half() -> None:
    *_, client = _one_of_two_fails(Bus(), "quorum")
    assert client.ending() == ("failed", "update_failed")


def test_silent_worker_does_not_stop_an_update_that_needs_any() -> None:
    bus = Bus()
    store, good, dead = bus.store(), bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    publish(client)
    prepare(good)
    dead.is_alive = False
    bus.advance(4)
    record(store)
    commit(good)
    problems = {each.worker: each.problem for each in published(client).workers}
    assert problems == {
        "w0": "",
        "w1": "silent during prepare_update: it was lost (lease expired)",
    }


@pytest.mark.parametrize(
    ("killed_before_s", "why"),
    [(10.0, "no weight store is connected"), (2.5, "it has said nothing for 2.")],
)
def test_a_store_that_is_away_while_workers_prepare_is_named_and_they_are_not_blamed(
    killed_before_s: float, why: str
) -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)  # it has 30 s, of which workers have 27
    bus.advance(27.0 - killed_before_s)
    store.is_alive = False
    bus.advance(killed_before_s + 1.0)
    problem = client.problem()
    assert problem.code == "update_failed"
    assert f"store: silent: {why}" in problem.message
    assert "w0: silent during prepare_update, which needs the store" in problem.message
    assert [each.state for each in bus.core.status(bus.now).workers] == ["ready"]
    assert bus.core.status(bus.now).troubled == {}
    client.generate()
    assert len(worker.take("generate")) == 1


def test_store_that_refuses_to_record_aborts_the_update() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)
    prepare(worker)
    store.end(store.heard_one("record_commit"), "failed", FAILED)
    assert client.ending() == ("failed", "update_failed")
    assert len(worker.take("abort_update")) == 1


def test_version_0_is_refused_by_its_field() -> None:
    bus = Bus()
    bus.store()
    bus.worker()
    client = bus.client()
    publish(client, version=0)
    problem = client.problem()
    assert (problem.code, problem.field) == ("bad_request", "version")


def test_version_below_the_committed_one_is_refused() -> None:
    bus = Bus()
    bus.store({"default": 5})
    bus.worker(version=5)
    client = bus.client()
    publish(client, version=4)
    problem = client.problem()
    assert (problem.code, problem.field) == ("stale_version", "version")
    assert "restore_version" in problem.message


def test_a_policy_that_no_worker_serves_is_compared_with_those_that_are_served() -> None:
    bus = Bus()
    bus.store()
    bus.worker()
    client = bus.client()
    client.ask("publish_version", PublishVersion("defualt", 1), deadline_s=30)
    bus.advance(11)
    problem = client.problem()
    assert problem.code == "not_ready"
    assert "no worker serves policy 'defualt' (did you mean 'default'?)" in problem.message


def test_second_update_of_a_policy_is_refused_while_one_runs() -> None:
    bus = Bus()
    bus.store()
    bus.worker()
    client = bus.client()
    publish(client, version=1)
    publish(client, version=2)
    assert client.problem().code == "update_in_progress"


def test_same_publish_again_starts_nothing() -> None:
    bus = Bus()
    bus.store()
    worker, client = bus.worker(), bus.client()
    rid = publish(client)
    publish(client, rid=rid)
    assert len(worker.take("prepare_update")) == 1
    assert client.take("refused") == []


def test_update_without_a_store_is_refused() -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    publish(client)
    bus.advance(12)
    assert client.ending() == ("refused", "no_store")


def test_worker_that_joins_late_catches_up_before_it_serves() -> None:
    bus = Bus()
    bus.store({"default": 3})
    client, late = bus.client(), bus.worker(version=0)
    client.generate(deadline_s=60)
    bus.advance(0.5)
    assert late.take("generate") == []
    prepare(late, 3)
    commit(late, 3)
    assert len(late.take("generate")) == 1


def test_catch_up_that_failed_is_tried_again() -> None:
    bus = Bus()
    bus.store({"default": 3})
    late = bus.worker(version=0)
    bus.advance(0.5)
    fail_to_prepare(late)
    bus.advance(3)
    assert len({each.rid for each in late.take("prepare_update")}) == 1


def test_worker_is_told_the_way_and_the_publisher_hears_which_it_was_and_why() -> None:
    bus = Bus()
    store = bus.store(host="host-a")
    near = bus.worker("w0", host="host-a", transports=["shm", "tcp"])
    far = bus.worker("w1", host="host-b", transports=["shm", "tcp"])
    client = bus.client()
    publish(client)
    assert prepare(near).transport == "shm"
    body = Prepared(1, 64, "tcp", 1.0, 64, "the link was slow")
    far.end(far.heard_one("prepare_update"), body=body)
    record(store)
    commit(near)
    commit(far)
    first, second = published(client).workers
    assert (first.transport, first.why) == ("shm", "it shares memory with the store")
    assert (second.transport, second.moved_bytes, second.why) == ("tcp", 64, "the link was slow")


def test_mode_and_in_flight_reach_the_workers() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client, mode="overwrite", in_flight="retract")
    assert prepare(worker).mode == "overwrite"
    record(store)
    command = worker.heard_one("commit_update")
    assert b"retract" in bytes(command.body)


def test_worker_started_after_version_7_serves_nothing_before_it_attests_it() -> None:
    bus = Bus()
    store, first, client = bus.store(), bus.worker(version=0), bus.client()
    publish(client, 7)
    prepare(first, 7)
    record(store)
    commit(first, 7)
    first.state = "draining"
    first.heartbeat()
    late = bus.worker("late")
    client.generate(deadline_s=60)
    bus.advance(0.5)
    assert "has version 0; 7 is committed" in bus.core.status(bus.now).workers[1].problem
    prepare(late, 7)
    assert late.take("generate") == []
    commit(late, 7)
    assert len(late.take("generate")) == 1
    assert bus.core.status(bus.now).workers[1].problem == ""


def test_reason_of_a_quarantine_shows_until_the_worker_has_caught_up() -> None:
    bus = Bus()
    store, good, bad, _ = _one_of_two_fails(bus)
    record(store)
    commit(good)
    problems = {each.name: each.problem for each in bus.core.status(bus.now).workers}
    assert problems == {"w0": "", "w1": "digest_mismatch: a tensor differs"}
    bus.advance(1)
    prepare(bad)
    commit(bad)
    assert {each.problem for each in bus.core.status(bus.now).workers} == {""}


def test_torn_worker_is_brought_to_the_committed_version_without_a_delta() -> None:
    bus = Bus()
    bus.store({"default": 3}, host="host-a")
    torn = bus.worker(version=2, host="host-b", transports=["delta", "tcp"])
    torn.state = "torn"
    torn.heartbeat()
    bus.advance(0.5)
    assert prepare(torn, 3).transport == "tcp"


def test_worker_that_is_behind_takes_a_delta_from_far_and_asks_its_like_first() -> None:
    bus = Bus()
    bus.store({"default": 3}, host="host-a")
    ways = ["delta", "tcp"]
    bus.worker("w0", version=3, host="host-b", transports=ways, bulk="tcp://w0:9")
    late = bus.worker("w1", version=2, host="host-b", transports=ways)
    bus.advance(0.5)
    ask = prepare(late, 3)
    assert (ask.transport, ask.sources) == ("delta", ["tcp://w0:9"])


def test_workers_that_join_together_ask_different_workers_first() -> None:
    bus = Bus()
    bus.store({"default": 3}, host="host-a")
    for name in ("w0", "w1", "w2"):
        bus.worker(name, version=3, host="host-b", bulk=f"tcp://{name}:9" if name != "w1" else "")
    asked: list[list[str]] = []
    for name in ("w3", "w4"):
        joining = bus.worker(name, host="host-c", bulk=f"tcp://{name}:9")
        bus.advance(0.5)
        asked.append(prepare(joining, 3).sources)
        commit(joining, 3)
    assert asked == [["tcp://w2:9", "tcp://w0:9"], ["tcp://w3:9", "tcp://w0:9"]]


def test_version_that_falls_behind_while_it_waits_for_a_store_is_refused() -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    publish(client, 4)
    bus.store({"default": 5})
    bus.advance(1)
    assert client.ending() == ("refused", "stale_version")


def test_group_that_lost_a_rank_is_not_used_for_the_next_try() -> None:
    bus = Bus()
    bus.store()
    workers = [bus.worker(f"w{n}", transports=["collective", "tcp"]) for n in range(2)]
    client = bus.client()
    offer = Offer("collective", "10.0.0.1:7", backend="gloo")
    publish(client, require="all", offers=[offer])
    ask = prepare(workers[0])
    assert (ask.transport, ask.rank, ask.world) == ("collective", 1, 3)
    workers[1].is_alive = False
    bus.advance(4)
    bus.worker("w1", transports=["collective", "tcp"])
    bus.advance(1)
    assert prepare(workers[0]).transport == "tcp"


@pytest.mark.parametrize(("of", "way"), [("router-a", "collective"), ("router-b", "tcp")])
def test_only_the_router_that_a_group_was_offered_to_uses_it(of: str, way: str) -> None:
    bus = Bus()
    bus.store()
    worker = bus.worker(transports=["collective", "tcp"])
    offer = Offer("collective", "10.0.0.1:7", backend="gloo", router=of)
    publish(bus.client(), offers=[offer])
    assert prepare(worker).transport == way


def test_store_that_comes_back_elsewhere_is_told_to_those_who_wait_for_it() -> None:
    bus = Bus()
    former = bus.store(bulk="tcp://127.0.0.1:1")
    workers, client = [bus.worker(f"w{n}") for n in range(3)], bus.client()
    publish(client, require="all")
    assert prepare(workers[0]).bulk == "tcp://127.0.0.1:1"
    former.is_alive = False
    store = bus.store(bulk="tcp://127.0.0.1:2")
    bus.advance(0.25)
    for worker in workers[1:]:
        worker.end(worker.heard_one("prepare_update"), "failed", FAILED)
        worker.end(worker.heard_one("abort_update"), body=Done())
    for worker in workers[1:]:
        assert prepare(worker).bulk == "tcp://127.0.0.1:2"
    record(store)
    for worker in workers:
        commit(worker)
    assert [each.is_active for each in published(client).workers] == [True] * 3
    assert workers[0].take("abort_update", "prepare_update") == []


def test_store_that_comes_back_where_it_was_stops_nobody() -> None:
    bus = Bus()
    former = bus.store()
    worker, client = bus.worker(), bus.client()
    publish(client)
    former.is_alive = False
    store = bus.store()
    prepare(worker)
    record(store)
    commit(worker)
    assert published(client).version == 1
    assert worker.take("abort_update") == []


def test_what_a_delta_moved_decides_who_takes_the_next_one() -> None:
    bus = Bus()
    store, client = bus.store({"default": 1}, "host-a"), bus.client()
    ways = ["delta", "tcp"]
    workers = [
        bus.worker(f"w{n}", version=1, host="host-b", transports=ways, bulk=f"tcp://w{n}:9")
        for n in range(3)
    ]
    # Before the first one it may be as large as the version; then its size is known.
    for version, moved_bytes, expected in ((2, 20, "tcp"), (3, 60, "delta"), (4, 60, "tcp")):
        publish(client, version)
        for worker in workers:
            command = worker.heard_one("prepare_update")
            ask = unpack(command)
            assert isinstance(ask, PrepareUpdate)
            assert ask.transport == ("delta" if worker is workers[-1] else expected)
            body = Prepared(version, 100, ask.transport, 1.0, moved_bytes)
            worker.end(command, body=body)
        record(store)
        for worker in workers:
            commit(worker, version)
            worker.heartbeat()


def test_torn_worker_waits_for_the_first_publication() -> None:
    bus = Bus()
    bus.store({})
    torn = bus.worker(version=0)
    torn.state = "torn"
    torn.heartbeat()
    bus.advance(5)
    assert torn.take("prepare_update") == []


def test_torn_worker_serves_nothing_and_is_mended_in_place_by_itself() -> None:
    bus = Bus()
    bus.store({"default": 3})
    worker, client = bus.worker(version=3), bus.client()
    worker.state = "torn"
    worker.heartbeat()
    client.generate(deadline_s=60)
    bus.advance(0.5)
    assert worker.take("generate") == []
    assert prepare(worker, 3).mode == "overwrite"
    worker.state = "ready"
    commit(worker, 3)
    worker.heartbeat()
    assert len(worker.take("generate")) == 1
