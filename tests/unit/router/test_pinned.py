"""Requests that name their worker: they go there, wait for it, or are refused."""

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import Pause
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Goodbye
from tests.unit.router.harness import Bus, SimWorker


def _rids(worker: SimWorker) -> list[str]:
    return [entry.rid for entry in worker.take("generate")]


@pytest.mark.parametrize("group", ["", "prompt-1"])
def test_a_request_goes_to_the_worker_that_it_names(group: str) -> None:
    bus = Bus()
    first, second = bus.worker("w0", slots=100), bus.worker("w1", slots=100)
    client = bus.client()
    client.generate(group=group)
    for worker in (first, second):
        worker.take("generate")
    named = [client.generate(worker="w1", group=group) for _ in range(20)]
    assert _rids(second) == named
    assert _rids(first) == []


def test_a_run_of_them_in_one_frame_goes_there_too() -> None:
    bus = Bus()
    bus.worker("w0", slots=100)
    second, client = bus.worker("w1", slots=100), bus.client()
    client.submit_all([client.next_rid() for _ in range(5)], worker="w1")
    assert len(_rids(second)) == 5


def test_it_waits_for_a_free_place_and_holds_nobody_up() -> None:
    bus = Bus()
    first, second = bus.worker("w0", slots=1), bus.worker("w1", slots=1)
    client = bus.client()
    for _ in range(4):
        client.generate()
    running = first.take("generate")
    first.accept(*running)
    second.accept(*second.take("generate"))
    pinned = client.generate(worker="w1", priority=5)
    other = client.generate()
    first.end(running[0])
    assert _rids(first) == [other], "who would also take another worker did not wait behind it"
    assert _rids(second) == []
    second.end(Entry("generate", second.running[0][0], second.running[0][1], route="trainer"))
    assert _rids(second) == [pinned]


def test_it_waits_for_a_worker_that_is_paused() -> None:
    bus = Bus()
    bus.worker("w0")
    second, client = bus.worker("w1"), bus.client()
    client.ask("pause", Pause(), "worker:w1")
    rid = client.generate(worker="w1")
    bus.advance(2)
    assert _rids(second) == []
    client.ask("resume", route="worker:w1")
    assert _rids(second) == [rid]


def test_it_waits_for_a_worker_that_was_lost_and_comes_back() -> None:
    bus = Bus()
    client, lost = bus.client(), bus.worker("w1")
    bus.worker("w0")
    lost.is_alive = False
    bus.advance(4)
    rid = client.generate(worker="w1", deadline_s=60)
    bus.advance(1)
    assert _rids(bus.worker("w1")) == [rid]


def test_its_deadline_says_what_the_worker_did() -> None:
    bus = Bus()
    client = bus.client()
    bus.worker("w1")
    client.ask("pause", Pause(), "worker:w1")
    client.generate(worker="w1", deadline_s=1)
    bus.advance(2)
    assert client.problem() == Problem(
        "deadline",
        "worker 'w1' did not take it before the deadline: it is paused",
        "not_started",
        "place.worker",
    )


def test_its_deadline_says_that_only_the_version_was_missing() -> None:
    bus = Bus()
    client = bus.client()
    bus.worker("w0", version=5)
    bus.worker("w1", version=5)
    client.generate("min:6", worker="w1", deadline_s=1)
    bus.advance(2)
    problem = client.problem()
    assert (problem.code, problem.field) == ("version_unavailable", "place.versions")


@pytest.mark.parametrize(
    ("worker", "policy", "told"),
    [
        ("w9", "default", "no worker 'w9' of policy 'default' is here or expected; there are w1"),
        ("w9", "other", "no worker 'w9' of policy 'other' is here or expected; there is none"),
        ("w1", "other", "worker 'w1' serves policy 'default', not 'other'"),
    ],
)
def test_a_worker_that_nobody_expects_is_refused_at_once(
    worker: str, policy: str, told: str
) -> None:
    bus = Bus()
    client = bus.client()
    bus.worker("w1")
    client.generate(worker=worker, policy=policy)
    assert client.problem() == Problem("unknown_worker", told, "not_started", "place.worker")


def test_a_worker_that_left_in_good_order_is_waited_for_no_more() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker("w1", slots=1)
    for _ in range(2):
        client.generate()
    worker.take("generate")
    client.generate(worker="w1")
    worker.is_alive = False
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("shutdown"))))
    bus.advance(1)
    assert client.problem().code == "unknown_worker"


def test_a_recovering_router_waits_for_whom_it_does_not_know_yet() -> None:
    bus = Bus(recovered=False)
    client = bus.client()
    rid = client.generate(worker="w1")
    assert _rids(bus.worker("w1")) == [rid]


def test_a_session_and_a_worker_exclude_each_other() -> None:
    bus = Bus()
    client = bus.client()
    bus.worker("w1")
    client.generate(session="chat", worker="w1")
    problem = client.problem()
    assert (problem.code, problem.field) == ("bad_request", "place.worker")
