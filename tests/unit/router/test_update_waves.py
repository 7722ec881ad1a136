"""A commit in waves: enough workers go on serving while others swap."""

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
    record(store)
    return store, workers, client


def _told(workers: list[SimWorker]) -> list[str]:
    heard = {each.name for each in workers if any(e.kind == "commit_update" for e in each.heard)}
    return sorted(heard)


def test_without_a_floor_all_commit_at_once() -> None:
    _, workers, _ = _prepared_fleet(Bus(), 3, 0)
    assert _told(workers) == ["w0", "w1", "w2"]


def test_next_wave_begins_when_the_one_before_has_answered() -> None:
    _, workers, client = _prepared_fleet(Bus(), 4, 2)
    assert _told(workers) == ["w0", "w1"]
    commit(workers[0])
    assert _told(workers) == ["w1"]
    commit(workers[1])
    assert _told(workers) == ["w2", "w3"]
    commit(workers[2])
    commit(workers[3])
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
    _, workers, client = _prepared_fleet(bus, 2, 1)
    workers[0].is_alive = False
    bus.advance(4)
    commit(workers[1])
    problems = {each.worker: each.problem for each in published(client).workers}
    assert problems == {"w0": "silent during commit_update", "w1": ""}


def test_worker_lost_before_its_wave_is_noted() -> None:
    bus = Bus()
    _, workers, client = _prepared_fleet(bus, 2, 1)
    workers[1].is_alive = False
    bus.advance(4)
    commit(workers[0])
    problems = {each.worker: each.problem for each in published(client).workers}
    assert problems == {"w0": "", "w1": "silent since prepare_update"}


def test_failed_commit_does_not_hold_up_the_next_wave() -> None:
    _, workers, client = _prepared_fleet(Bus(), 2, 1)
    workers[0].end(workers[0].heard_one("commit_update"), "failed", FAILED)
    commit(workers[1])
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
    _, workers, client = _prepared_fleet(bus, 2, 1)
    bus.advance(31)
    first, second = published(client).workers
    assert first.problem == "silent during commit_update"
    assert second.problem == "its turn to commit did not come before the deadline"
    bus.advance(1)
    assert len({each.rid for each in workers[1].take("prepare_update")}) == 1
