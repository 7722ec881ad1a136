"""A commit in waves: enough workers go on serving while others swap."""

from itertools import pairwise

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.weights import RecordCommit
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


def _prepared_fleet(
    bus: Bus, n_workers: int, floor: int
) -> tuple[SimStore, list[SimWorker], SimClient]:
    store, client = bus.store(), bus.client()
    workers = [bus.worker(f"w{n}") for n in range(n_workers)]
    publish(client, floor=floor)
    for worker in workers:
        prepare(worker)
    assert _recorded(store) == (1, floor)
    return store, workers, client


def _told(workers: list[SimWorker]) -> list[str]:
    heard = {each.name for each in workers if any(e.kind == "commit_update" for e in each.heard)}
    return sorted(heard)


def test_without_a_floor_all_commit_at_once() -> None:
    _, workers, _ = _prepared_fleet(Bus(), 3, 0)
    assert _told(workers) == ["w0", "w1", "w2"]


def test_next_wave_begins_when_the_one_before_has_answered() -> None:
    store, workers, client = _prepared_fleet(Bus(), 4, 2)
    assert _told(workers) == ["w0", "w1"]
    commit(workers[0])
    assert _told(workers) == ["w1"]
    commit(workers[1])
    assert _told(workers) == ["w2", "w3"]
    commit(workers[2])
    commit(workers[3])
    record(store)
    assert [each.is_active for each in published(client).workers] == [True] * 4


def test_old_and_new_versions_serve_during_the_waves() -> None:
    bus = Bus()
    _, workers, client = _prepared_fleet(bus, 2, 1)
    commit(workers[0])
    client.generate("min:1")
    client.generate("exact:0")
    assert len(workers[0].take("generate")) == 1
    assert len(workers[1].take("generate")) == 1


def test_fewer_workers_than_the_floor_commit_one_at_a_time() -> None:
    _, workers, _ = _prepared_fleet(Bus(), 2, 5)
    assert _told(workers) == ["w0"]
    commit(workers[0])
    assert _told(workers) == ["w1"]


def test_lost_worker_does_not_hold_up_the_next_wave() -> None:
    bus = Bus()
    store, workers, client = _prepared_fleet(bus, 2, 1)
    workers[0].is_alive = False
    bus.advance(4)
    commit(workers[1])
    record(store)
    problems = {each.worker: each.problem for each in published(client).workers}
    why = "silent during commit_update: it was lost (lease expired)"
    assert problems == {"w0": why, "w1": ""}


def test_worker_lost_before_its_wave_is_noted() -> None:
    bus = Bus()
    store, workers, client = _prepared_fleet(bus, 2, 1)
    workers[1].is_alive = False
    bus.advance(4)
    commit(workers[0])
    record(store)
    problems = {each.worker: each.problem for each in published(client).workers}
    assert problems == {"w0": "", "w1": "silent since prepare_update"}


def test_failed_commit_does_not_hold_up_the_next_wave() -> None:
    store, workers, client = _prepared_fleet(Bus(), 2, 1)
    workers[0].end(workers[0].heard_one("commit_update"), "failed", FAILED)
    commit(workers[1])
    record(store)
    assert [each.is_active for each in published(client).workers] == [False, True]


def test_worker_that_could_not_prepare_serves_on_and_counts_for_the_floor() -> None:
    bus = Bus()
    store, client = bus.store(), bus.client()
    workers = [bus.worker(f"w{n}") for n in range(3)]
    publish(client, floor=1)
    fail_to_prepare(workers[0])
    prepare(workers[1])
    prepare(workers[2])
    record(store)
    assert _told(workers) == ["w1", "w2"]


def test_waves_that_do_not_come_before_the_deadline_are_left_to_catch_up() -> None:
    bus = Bus()
    store, workers, client = _prepared_fleet(bus, 2, 1)
    bus.advance(31)
    record(store)
    first, second = published(client).workers
    assert first.problem == "silent during commit_update"
    assert second.problem == "its turn to commit did not come before the deadline"
    bus.advance(1)
    assert len({each.rid for each in workers[1].take("prepare_update")}) == 1


def test_nobody_hears_of_the_version_before_the_store_knows_that_the_waves_are_through() -> None:
    bus = Bus()
    store, workers, client = _prepared_fleet(bus, 2, 1)
    for worker in workers:
        commit(worker)
    client.generate("latest")
    assert [len(each.take("generate")) for each in workers].count(1) == 1
    assert client.take("finished") == []
    assert _recorded(store) == (1, 0)
    assert published(client).version == 1


def _recorded(store: SimStore) -> tuple[int, int]:
    """Write the decision down: (version, floor)."""
    command = store.heard_one("record_commit")
    body = unpack(command)
    assert isinstance(body, RecordCommit)
    store.end(command, body=Done())
    return body.version, body.floor


def _restarted_in_mid_waves(n_workers: int, floor: int) -> tuple[Bus, SimStore, list[SimWorker]]:
    """A new router: the store has recorded version 1, and one worker has it."""
    bus = Bus(recovered=False)
    workers = [bus.worker(f"w{n}", version=int(n == 0)) for n in range(n_workers)]
    store = bus.store({"default": 1}, waves={"default": (0, floor)})
    return bus, store, workers


def test_new_router_goes_on_in_waves_when_everybody_could_come_back() -> None:
    bus, store, workers = _restarted_in_mid_waves(4, 3)
    bus.advance(3)
    assert all(each.take("prepare_update") == [] for each in workers)
    bus.advance(1)
    for worker in workers:
        prepare(worker)
    assert _told(workers) == ["w0"]
    for behind, following in pairwise(workers):
        commit(behind)
        assert _told(workers) == [following.name]
    commit(workers[-1])
    assert _recorded(store) == (1, 0)
    assert bus.core.context.committed == {"default": 1}


def test_workers_that_wait_for_their_wave_serve_under_a_new_router() -> None:
    bus, _, workers = _restarted_in_mid_waves(2, 1)
    client = bus.client()
    client.generate("exact:0")
    client.generate("min:1")
    assert [len(each.take("generate")) for each in workers] == [1, 1]


def test_waves_that_nobody_can_go_on_with_end_and_the_others_catch_up() -> None:
    bus, store, workers = _restarted_in_mid_waves(2, 1)
    bus.advance(4)
    prepare(workers[0])
    fail_to_prepare(workers[1])
    commit(workers[0])
    assert _recorded(store) == (1, 0)
    bus.advance(3)
    prepare(workers[1])
    commit(workers[1])
    assert workers[1].version == 1


def test_publisher_that_asks_a_new_router_again_waits_for_the_waves() -> None:
    bus, store, workers = _restarted_in_mid_waves(3, 2)
    client = bus.client()
    publish(client, floor=2, require="all")
    bus.advance(4)
    prepare(workers[0])
    prepare(workers[1])
    fail_to_prepare(workers[2])  # too late to refuse: it was decided by the router before
    for worker in workers[:2]:
        assert _told(workers[:2]) == [worker.name]
        commit(worker)
    assert _recorded(store) == (1, 0)
    assert [each.is_active for each in published(client).workers] == [True, True, False]


def test_publication_whose_deadline_passes_during_earlier_waves_ends_then_and_never_begins() -> (
    None
):
    bus, store, workers = _restarted_in_mid_waves(1, 1)
    bus.advance(4)
    client = bus.client()
    publish(client, 2)  # it has 30 s
    bus.advance(29.5)
    assert client.take("expired") == []
    bus.advance(1)
    problem = client.problem()
    assert (problem.code, problem.outcome) == ("deadline", "not_started")
    prepare(workers[0], 1)
    commit(workers[0], 1)
    assert _recorded(store) == (1, 0)
    bus.advance(1)
    assert workers[0].take("prepare_update") == []
    assert client.take("finished", "failed", "expired") == []


def test_version_that_an_earlier_router_recorded_is_in_doubt_if_its_waves_take_too_long() -> None:
    bus, _, _ = _restarted_in_mid_waves(1, 1)
    bus.advance(4)
    client = bus.client()
    publish(client, 1)
    bus.advance(31)
    problem = client.problem()
    assert (problem.code, problem.outcome) == ("update_unknown", "unknown")


def test_store_that_tells_of_waves_before_the_first_version_is_heard() -> None:
    bus = Bus(recovered=False)
    bus.store({"default": 0}, waves={"default": (0, 1)})
    assert bus.core.status(bus.now).committed.get("default", 0) == 0
