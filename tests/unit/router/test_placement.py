"""Which worker gets a request."""

from collections import Counter

import pytest

from rolloutbus.bus.wire.entry import Entry
from tests.unit.router.harness import Bus, SimWorker


def _generates(worker: SimWorker) -> list[Entry]:
    return worker.take("generate")


def test_requests_of_one_session_go_to_one_worker() -> None:
    bus = Bus()
    workers = [bus.worker(f"w{number}") for number in range(4)]
    client = bus.client()
    for _ in range(4):
        client.generate(session="chat")
    assert sorted(len(_generates(worker)) for worker in workers) == [0, 0, 0, 4]


def test_samples_of_one_group_go_to_one_worker() -> None:
    bus = Bus()
    workers = [bus.worker(f"w{number}", slots=8) for number in range(4)]
    client = bus.client()
    for _ in range(8):
        client.generate(group="prompt-1")
    assert sorted(len(_generates(worker)) for worker in workers) == [0, 0, 0, 8]


def test_session_moves_when_its_worker_is_gone() -> None:
    bus = Bus()
    client, first = bus.client(), bus.worker("w0")
    client.generate(session="chat")
    first.accept(*_generates(first))
    second = bus.worker("w1")
    first.is_alive = False
    bus.advance(4)
    client.generate(session="chat")
    assert len(_generates(second)) == 1
    assert bus.core.status(bus.now).counters["sessions_moved"] == 1


def test_session_leaves_a_worker_whose_version_does_not_do() -> None:
    bus = Bus()
    client, old = bus.client(), bus.worker("w0", version=0)
    client.generate(session="chat")
    new = bus.worker("w1", version=5)
    client.generate("min:5", session="chat")
    assert len(_generates(old)) == 1
    assert len(_generates(new)) == 1


def test_worker_gets_no_more_than_its_slots_and_a_small_queue() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker(slots=4)
    for _ in range(20):
        client.generate()
    assert len(_generates(worker)) == 6


def test_session_waits_for_its_worker_up_to_twice_its_capacity() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker(slots=4)
    for _ in range(20):
        client.generate(session="chat")
    assert len(_generates(worker)) == 12


def test_load_is_spread_by_outstanding_tokens(seed: int) -> None:
    bus = Bus(seed=seed)
    workers = [bus.worker(f"w{number}", slots=100) for number in range(8)]
    client = bus.client()
    for _ in range(80):
        client.generate(cost=100)
    loads = [len(_generates(worker)) for worker in workers]
    assert sum(loads) == 80
    assert max(loads) <= 20


@pytest.mark.parametrize("is_session", [True, False])
def test_what_will_stay_begins_where_the_load_is_least(*, is_session: bool, seed: int) -> None:
    bus = Bus(seed=seed)
    workers = [bus.worker(f"w{number}", slots=100) for number in range(8)]
    client = bus.client()
    for number in range(64):
        key = f"k{number}"
        client.generate(
            cost=100, session=key if is_session else "", group="" if is_session else key
        )
    assert [len(_generates(worker)) for worker in workers] == [8] * 8


def test_groups_with_long_prompts_do_not_keep_others_off_a_worker(seed: int) -> None:
    bus = Bus(seed=seed)
    workers = [bus.worker(f"w{number}", slots=100) for number in range(4)]
    client = bus.client()
    for number in range(16):
        for _ in range(4):
            client.generate(cost=3_000 if number % 4 else 300, group=f"g{number}")
    assert [len(_generates(worker)) for worker in workers] == [16] * 4


def test_sessions_with_long_contexts_are_kept_apart(seed: int) -> None:
    bus = Bus(seed=seed)
    workers = [bus.worker(f"w{number}", slots=100) for number in range(2)]
    client = bus.client()
    for number in range(5):
        client.generate(cost=300 if number else 60_000, session=f"s{number}")
    assert sorted(len(_generates(worker)) for worker in workers) == [1, 4]


def test_nobody_queues_at_a_worker_while_a_slot_of_another_is_free(seed: int) -> None:
    """Who does may wait for the end of a whole generation."""
    bus = Bus(seed=seed)
    client = bus.client()
    workers = [bus.worker(f"w{number}", slots=16, version=number % 2) for number in range(6)]
    for number in range(96):
        client.generate("any" if number % 3 else "min:0", cost=1 + number % 7)
    assert [len(_generates(worker)) for worker in workers] == [16] * 6
    for _ in range(12):
        client.generate()
    assert sum(len(_generates(worker)) for worker in workers) == 12


def test_a_slot_that_an_ending_freed_is_taken_before_any_queue() -> None:
    bus = Bus()
    client, workers = bus.client(), [bus.worker(f"w{number}", slots=4) for number in range(2)]
    for _ in range(8):
        client.generate()
    first = _generates(workers[0])
    workers[0].accept(*first)
    workers[0].end(first[0])
    client.generate()
    assert (len(_generates(workers[0])), len(_generates(workers[1]))) == (1, 4)


def test_worker_with_expensive_requests_gets_fewer(seed: int) -> None:
    bus = Bus(seed=seed)
    client, busy = bus.client(), bus.worker("w0", slots=400)
    client.generate(cost=1_000_000)
    idle = bus.worker("w1", slots=400)
    for _ in range(100):
        client.generate(cost=10)
    assert len(_generates(idle)) > len(_generates(busy))


def test_exact_version_goes_only_to_workers_that_have_it() -> None:
    bus = Bus()
    client = bus.client()
    workers = {version: bus.worker(f"w{version}", version=version) for version in (1, 2, 3)}
    for _ in range(3):
        client.generate("exact:2")
    counts = Counter({version: len(_generates(worker)) for version, worker in workers.items()})
    assert counts == Counter({1: 0, 2: 3, 3: 0})


@pytest.mark.parametrize("n_old", [0, 8, 40])
def test_load_is_spread_among_those_that_have_the_weights(n_old: int, seed: int) -> None:
    """Whether most workers have them or few."""
    bus = Bus(seed=seed)
    old = [bus.worker(f"old{number}", slots=100, version=1) for number in range(n_old)]
    new = [bus.worker(f"new{number}", slots=100, version=2) for number in range(8)]
    client = bus.client()
    for _ in range(80):
        client.generate("min:2", cost=100)
    loads = [len(_generates(worker)) for worker in new]
    assert sum(loads) == 80
    assert max(loads) <= 20
    assert [_generates(worker) for worker in old] == [[]] * n_old


def test_the_one_worker_among_many_that_has_the_weights_is_found(seed: int) -> None:
    bus = Bus(seed=seed)
    for number in range(60):
        bus.worker(f"old{number}", version=1)
    new = bus.worker("new", slots=8, version=2)
    client = bus.client()
    for _ in range(5):
        client.generate("exact:2")
    assert len(_generates(new)) == 5


@pytest.mark.parametrize("versions", ["any", "latest", "min:0"])
def test_a_worker_is_told_the_priority_whatever_versions_will_do(versions: str) -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    client.generate(versions, priority=7)
    (told,) = _generates(worker)
    assert told.place is not None
    assert told.place.priority == 7


def test_latest_is_made_concrete_for_the_worker() -> None:
    bus = Bus()
    bus.store({"default": 7})
    client, worker = bus.client(), bus.worker(version=7)
    client.generate("latest")
    client.generate("max-staleness:2")
    places = [command.place for command in _generates(worker)]
    assert [place.versions for place in places if place] == ["min:7", "min:5"]


def test_request_waits_until_a_worker_attests_its_version() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker(version=1)
    client.generate("min:2")
    assert _generates(worker) == []
    worker.version = 2
    worker.heartbeat()
    assert len(_generates(worker)) == 1


def test_worker_below_the_committed_version_gets_nothing() -> None:
    bus = Bus()
    bus.store({"default": 3})
    client, stale = bus.client(), bus.worker(version=2)
    client.generate()
    assert _generates(stale) == []


def test_paused_worker_gets_nothing_until_it_is_ready_again() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    worker.state = "paused"
    worker.heartbeat()
    client.generate()
    assert _generates(worker) == []
    worker.state = "ready"
    worker.heartbeat()
    assert len(_generates(worker)) == 1


@pytest.mark.parametrize("versions", ["any", "latest", "min:3", "min-tag:1"])
def test_a_policy_that_nobody_knows_is_refused_after_a_grace(versions: str) -> None:
    bus = Bus(expected_workers={"w0": "default", "w1": "judge"})
    bus.worker()
    client = bus.client()
    client.generate(policy="defualt", versions=versions, deadline_s=600)
    bus.advance(9)
    assert client.take("refused", "expired") == []
    bus.advance(2)
    problem = client.problem()
    assert (problem.code, problem.field) == ("unknown_policy", "place.policy")
    assert problem.message.endswith("there are 'default', 'judge'")


def test_a_policy_whose_worker_comes_within_the_grace_is_served() -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    client.generate(policy="judge", deadline_s=600)
    bus.advance(9)
    late = bus.worker("w1", policy="judge")
    assert len(_generates(late)) == 1
    bus.advance(5)
    assert client.take("refused", "expired") == []


@pytest.mark.parametrize("has_lost_all", [False, True])
def test_a_policy_that_is_known_is_waited_for(has_lost_all: bool) -> None:
    expected = {} if has_lost_all else {"w1": "judge"}
    bus = Bus(expected_workers=expected)
    bus.store({"judge": 3} if has_lost_all else {})
    bus.worker()
    client = bus.client()
    client.generate(policy="judge", deadline_s=600)
    bus.advance(40)
    assert client.take("refused", "expired") == []


def test_where_no_worker_ever_was_a_request_waits_for_the_first() -> None:
    bus = Bus()
    client = bus.client()
    client.generate(deadline_s=600)
    bus.advance(40)
    assert len(_generates(bus.worker())) == 1


def test_who_waited_in_vain_is_told_which_policies_there_are() -> None:
    bus = Bus()
    client = bus.client()
    client.generate(policy="other", deadline_s=1)
    bus.advance(1.5)
    assert client.problem().message.endswith("deadline: no worker is here at all")
    bus.worker()
    client.generate(policy="other", deadline_s=1)
    bus.advance(1.5)
    assert client.problem().message.endswith("here or expected; there are 'default'")


def test_who_waited_in_vain_is_told_that_the_workers_are_paused() -> None:
    bus = Bus()
    workers, client = [bus.worker(f"w{number}") for number in range(10)], bus.client()
    for worker in workers[:9]:
        worker.state = "paused"
        worker.heartbeat()
    workers[9].state = "asleep"
    workers[9].heartbeat()
    client.generate(deadline_s=1)
    bus.advance(1.5)
    assert client.problem().message.endswith(
        "deadline: w0 is paused, w1 is paused, w2 is paused, w3 is paused, w4 is paused, "
        "w5 is paused, w6 is paused, w7 is paused and 2 more; `resume` lets it go on"
    )


def test_who_waited_for_a_version_is_told_who_is_paused_and_what_each_has() -> None:
    bus = Bus()
    worker, client = bus.worker("w0", version=3), bus.client()
    bus.worker("w1", version=4)
    worker.state = "paused"
    worker.heartbeat()
    client.generate(versions="min:9", deadline_s=1)
    bus.advance(1.5)
    assert client.problem().message.endswith(
        "at min:9 before the deadline: w0 is paused with version 3, w1 is ready with version 4; "
        "`resume` lets it go on"
    )


def test_request_that_expires_while_all_workers_sleep_is_told_that_none_was_ready() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    worker.state = "asleep"
    worker.heartbeat()
    client.generate(deadline_s=1)
    bus.advance(1.5)
    problem = client.problem()
    assert problem.code == "deadline"
    assert "no worker of policy 'default' was ready" in problem.message
