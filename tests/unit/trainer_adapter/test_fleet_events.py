"""What happened between two answers of a router, in sentences."""

import msgspec

from rolloutbus.bus.wire.counters import ROUTER_COUNTERS
from rolloutbus.bus.wire.messages.control import FleetStatus, StoreStatus, WorkerStatus
from rolloutbus.bus.wire.messages.weights import UpdateStatus
from rolloutbus.trainer_adapter.client.fleet_events import FAULTS, events_between, faults_of

W0 = WorkerStatus("w0", "b0.1", "ready", "default", 7, "fake", 4, 2, 0, 0, 0.0, 42)
W1 = msgspec.structs.replace(W0, name="w1")
BEFORE = FleetStatus(1, "r", False, [W0, W1], {"default": 7}, 0, 0, 1, {"lost": 1})  # noqa: FBT003


def told(before: FleetStatus = BEFORE, **changes: object) -> list[tuple[str, str, str]]:
    now = msgspec.structs.replace(before, **changes)
    return [(each.level, each.who, each.what) for each in events_between(before, now)]


def changed(worker: WorkerStatus, **changes: object) -> WorkerStatus:
    return msgspec.structs.replace(worker, **changes)


def test_nothing_is_told_of_a_fleet_that_stays_as_it_is() -> None:
    assert told(n_running=3, workers=[changed(W0, n_tokens=99, beat_age_ms=300), W1]) == []


def test_a_worker_that_is_lost_is_a_fault_with_its_reason() -> None:
    events = told(workers=[W0], absent={"w1": "its lease ended"})
    assert events == [("fault", "w1", "is gone: its lease ended")]


def test_a_worker_that_leaves_and_comes_back_is_told() -> None:
    assert told(workers=[W0]) == [("warning", "w1", "left")]
    alone = msgspec.structs.replace(BEFORE, workers=[W0])
    assert told(alone, workers=[W0, W1]) == [("change", "w1", "joined with v7")]


def test_sessions_that_get_another_worker_are_told() -> None:
    moved = told(counters={**BEFORE.counters, "places_moved": 3})
    assert moved == [("change", "router", "moved 3 sessions to another worker")]


def test_a_worker_of_the_same_name_in_another_process_is_a_fault() -> None:
    assert told(workers=[changed(W0, epoch="b9.1"), W1]) == [
        ("fault", "w0", "is another process now")
    ]


def test_a_blocked_worker_is_told_with_each_reason_and_when_it_ends() -> None:
    blocked = changed(W0, state="stale", blocked_by={"behind": "Its weights are older."})
    assert told(workers=[blocked, W1]) == [
        ("change", "w0", "is stale after ready"),
        ("warning", "w0", "gets no requests, behind: Its weights are older."),
    ]
    before = msgspec.structs.replace(BEFORE, workers=[blocked, W1])
    assert ("change", "w0", "gets requests again") in told(before, workers=[W0, W1])


def test_a_version_that_the_store_cannot_write_is_a_fault() -> None:
    well = msgspec.structs.replace(BEFORE, store=StoreStatus("store", 0))
    ill = StoreStatus("store", 0, {"unwritten_versions": 1})
    [(level, who, what)] = told(well, store=ill)
    assert (level, who) == ("fault", "store")
    assert "could not write the last version" in what
    assert told(msgspec.structs.replace(BEFORE, store=ill), store=ill) == []


def test_an_update_is_told_phase_by_phase() -> None:
    preparing = UpdateStatus("default", 8, "preparing", 10, 2)
    committing = msgspec.structs.replace(preparing, phase="committing", n_prepared=2)
    under_way = msgspec.structs.replace(BEFORE, updates=[preparing])
    assert told(updates=[preparing]) == [("change", "default", "v8 is preparing, 2 to have it")]
    assert told(under_way, updates=[committing]) == [
        ("change", "default", "v8 is committing after preparing")
    ]
    assert told(under_way, updates=[], committed={"default": 8}) == [
        ("change", "default", "v8 is committed")
    ]
    assert told(under_way, updates=[]) == [("fault", "default", "v8 was given up in preparing")]


def test_a_version_that_moves_is_told_of_the_worker() -> None:
    assert told(workers=[changed(W0, version=8), W1]) == [
        ("change", "w0", "samples with v8 after v7")
    ]


def test_faults_are_told_by_how_much_they_grew_but_not_those_of_another_router() -> None:
    assert told(counters={"lost": 3, "session_turns": 9}) == [
        ("fault", "router", f"lost +2: {ROUTER_COUNTERS['lost']}")
    ]
    assert told(instance="other", counters={"lost": 5}) == [
        ("fault", "router", "is another process now, of epoch 1")
    ]
    assert faults_of(BEFORE) == {"lost": 1}
    assert set(FAULTS) <= set(ROUTER_COUNTERS)


def test_a_pause_and_a_lost_store_are_told() -> None:
    with_store = msgspec.structs.replace(BEFORE, store=StoreStatus("store", 0))
    assert told(pause="in_place") == [("warning", "fleet", "is to be paused: in_place")]
    assert told(with_store, store=None) == [("fault", "store", "is not connected any more")]
