"""What a publisher, and everybody who looks, sees of an update."""

from tests.unit.router.harness import Bus
from tests.unit.router.update_steps import (
    commit,
    fail_to_prepare,
    prepare,
    progress,
    publish,
    record,
)


def test_publisher_is_told_of_each_phase_and_each_worker_under_the_rid_of_its_command() -> None:
    bus = Bus()
    store, workers, client = bus.store(), [bus.worker("w0"), bus.worker("w1")], bus.client()
    rid = publish(client)
    prepare(workers[0])
    prepare(workers[1])
    record(store)
    commit(workers[0])
    commit(workers[1])
    assert {each.rid for each in client.heard if each.kind == "update_progress"} == {rid}
    told = [(each.phase, each.n_prepared, each.n_active) for each in progress(client)]
    assert told == [
        ("preparing", 0, 0),
        ("preparing", 1, 0),
        ("preparing", 2, 0),
        ("recording", 2, 0),
        ("committing", 2, 0),
        ("committing", 2, 1),
        ("committing", 2, 2),
        ("committed", 2, 2),
    ]


def test_publisher_that_asks_again_is_told_how_far_it_has_come() -> None:
    bus = Bus()
    store, workers, client = bus.store(), [bus.worker("w0"), bus.worker("w1")], bus.client()
    rid = publish(client)
    for worker in workers:
        prepare(worker)
    record(store)
    commit(workers[0])
    latest = progress(client)[-1]
    assert (latest.phase, latest.n_active) == ("committing", 1)
    publish(client, rid=rid)
    assert progress(client) == [latest]


def test_publisher_sees_that_its_update_began_again() -> None:
    bus = Bus()
    bus.store()
    workers, client = [bus.worker("w0"), bus.worker("w1")], bus.client()
    rid = publish(client, require="all")
    prepare(workers[0])
    [first] = {each.update for each in progress(client)}
    workers[1].is_alive = False
    bus.advance(4)
    bus.worker("w1")
    bus.advance(1)
    publish(client, rid=rid)
    *_, again, repeated = progress(client)
    assert (again.phase, again.n_prepared) == ("preparing", 0)
    assert again.update != first
    assert repeated == again


def test_publisher_is_told_that_it_was_aborted() -> None:
    bus = Bus()
    bus.store()
    worker, client = bus.worker(), bus.client()
    publish(client)
    fail_to_prepare(worker)
    assert [each.phase for each in progress(client)] == ["preparing", "aborted"]


def test_status_lists_updates_under_way() -> None:
    bus = Bus()
    store, workers, client = bus.store(), [bus.worker("w0"), bus.worker("w1")], bus.client()
    publish(client, 7)
    prepare(workers[0], 7)
    bus.advance(1)
    (update,) = bus.core.status(bus.now).updates
    assert (update.version, update.phase, update.age_ms) == (7, "preparing", 1000)
    assert (update.n_targets, update.n_prepared, update.is_catch_up) == (2, 1, False)
    prepare(workers[1], 7)
    record(store)
    for worker in workers:
        commit(worker, 7)
    assert bus.core.status(bus.now).updates == []


def test_catching_up_shows_as_such() -> None:
    bus = Bus()
    bus.store({"default": 3})
    bus.worker()
    bus.advance(0.5)
    (update,) = bus.core.status(bus.now).updates
    assert (update.version, update.n_targets, update.is_catch_up) == (3, 1, True)
