"""`generate` from submission to ending, seen by its client and its worker."""

from typing import Any

import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Accepted, Queued
from rolloutbus.bus.wire.messages.generation import Abort
from tests.unit.router.harness import Bus


def test_request_goes_to_the_worker_under_its_lease_and_comes_back_to_its_client() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate()
    (command,) = worker.take("generate")
    assert (command.rid, command.epoch, command.route) == (rid, worker.epoch, "trainer")
    worker.end(command)
    (ending,) = client.take("finished")
    assert (ending.rid, ending.attempt, ending.route) == (rid, command.attempt, "w0")


def test_ack_passes_to_the_worker_and_the_request_is_forgotten() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate()
    worker.end(worker.heard_one("generate"))
    client.acknowledge(client.heard_one("finished"))
    assert len(worker.take("ack")) == 1
    assert len(bus.core.table) == 0


def test_ack_for_the_request_of_another_client_frees_nothing() -> None:
    bus = Bus()
    worker, client, thief = bus.worker(), bus.client(), bus.client("thief")
    client.generate()
    worker.end(worker.heard_one("generate"))
    thief.acknowledge(client.heard_one("finished"))
    assert worker.take("ack") == []
    assert len(bus.core.table) == 1


def test_same_rid_again_does_not_start_a_second_execution() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate()
    client.submit(rid)
    assert len(worker.take("generate")) == 1


def test_same_rid_again_while_running_is_answered_with_accepted() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate()
    worker.accept(*worker.take("generate"))
    client.take("accepted")
    client.submit(rid)
    accepted = client.take_body("accepted")
    assert isinstance(accepted, Accepted)
    assert [item[0] for item in accepted.items] == [rid]


def test_rid_of_another_client_is_refused() -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    client.submit("other/1")
    problem = client.problem()
    assert (problem.code, problem.field) == ("bad_request", "rid")


@pytest.mark.parametrize(
    "rid", ["trainer/01", "trainer/", "trainer/x", "trainer/1@w0", "trainer/-1", "trainer/\u0661"]
)
def test_malformed_rid_is_refused(rid: str) -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.submit(rid)
    assert client.problem().field == "rid"
    assert worker.take("generate") == []


@pytest.mark.parametrize(
    ("place", "field"),
    [
        ({"versions": "newest"}, "place.versions"),
        ({"priority": 101}, "place.priority"),
        ({"cost": -1}, "place.cost"),
        ({"policy": "a b"}, "place.policy"),
        ({"session": "a@b"}, "place.session"),
        ({"group": " "}, "place.group"),
    ],
)
def test_bad_placement_is_refused_even_after_a_good_one(place: dict[str, Any], field: str) -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    client.generate()
    client.generate(**place)
    assert client.problem().field == field


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (Entry("generate", "trainer/1", deadline_ms=1000), "place"),
        (Entry("generate", "trainer/1", place=Placement("default")), "deadline_ms"),
        (
            Entry("generate", "trainer/1", route="w0", deadline_ms=9, place=Placement("default")),
            "route",
        ),
    ],
)
def test_generate_without_its_parts_is_refused(entry: Entry, field: str) -> None:
    bus = Bus()
    client = bus.client()
    client.say(entry)
    assert client.problem().field == field


def test_full_queue_refuses_with_a_time_to_come_back() -> None:
    bus = Bus(queue_limit=2)
    client = bus.client()
    for _ in range(3):
        client.generate()
    problem = client.problem()
    assert problem.code == "busy"
    assert 200 <= problem.retry_after_ms <= 400


def test_queued_requests_are_reported_once() -> None:
    bus = Bus()
    client = bus.client()
    rid = client.generate()
    bus.advance(1)
    queued = client.take_body("queued")
    assert isinstance(queued, Queued)
    assert queued.rids == [rid]


def test_late_request_expires_when_workers_were_only_full() -> None:
    bus = Bus()
    worker, client = bus.worker(slots=1), bus.client()
    for _ in range(2):
        client.generate(deadline_s=60)
    worker.accept(*worker.take("generate"))
    client.generate(deadline_s=1)
    bus.advance(1.5)
    assert client.ending() == ("expired", "deadline")


def test_late_request_is_refused_when_no_worker_ever_had_the_version() -> None:
    bus = Bus()
    bus.worker(version=3)
    client = bus.client()
    client.generate("min:4", deadline_s=1)
    bus.advance(1.5)
    problem = client.problem()
    assert (problem.code, problem.field) == ("version_unavailable", "place.versions")


def test_unconfirmed_request_is_sent_again_until_accepted() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=60)
    (first,) = worker.take("generate")
    bus.advance(2)
    (second,) = worker.take("generate")
    assert (second.rid, second.attempt) == (first.rid, first.attempt)
    assert second.deadline_ms < first.deadline_ms
    worker.accept(first)
    bus.advance(8)
    assert worker.take("generate") == []


def test_deadline_left_is_what_the_worker_is_told() -> None:
    bus = Bus()
    client = bus.client()
    client.generate(deadline_s=10)
    bus.advance(4)
    (command,) = bus.worker().take("generate")
    assert command.deadline_ms == pytest.approx(6000, abs=2)


def test_higher_priority_leaves_the_queue_first() -> None:
    bus = Bus()
    client = bus.client()
    low = client.generate(priority=-1)
    first, second = client.generate(priority=5), client.generate(priority=5)
    rids = [command.rid for command in bus.worker().take("generate")]
    assert rids == [first, second, low]


def test_lane_whose_version_nobody_has_does_not_block_the_others() -> None:
    bus = Bus()
    client = bus.client()
    client.generate("min:9")
    rid = client.generate()
    (command,) = bus.worker().take("generate")
    assert command.rid == rid


def test_freed_place_is_taken_by_who_waits() -> None:
    bus = Bus()
    worker, client = bus.worker(slots=1), bus.client()
    rids = [client.generate() for _ in range(3)]
    first, _second = worker.take("generate")
    worker.end(first)
    (third,) = worker.take("generate")
    assert third.rid == rids[2]


def test_aborting_a_queued_request_ends_it_at_once() -> None:
    bus = Bus()
    client = bus.client()
    rid = client.generate()
    client.ask("abort", Abort([rid]))
    (cancelled,) = client.take("cancelled")
    assert cancelled.rid == rid
    assert bus.worker().take("generate") == []


def test_aborting_the_head_of_the_queue_lets_the_next_one_through() -> None:
    bus = Bus()
    worker, client = bus.worker("w0", slots=1), bus.client()
    sticky = client.generate(session="s")
    client.generate()
    worker.accept(*worker.take("generate"))
    head = client.generate()
    follower = client.generate(session="s")
    assert worker.take("generate") == []
    client.ask("abort", Abort([head]))
    assert [each.rid for each in worker.take("generate")] == [follower]
    assert sticky != follower


@pytest.mark.parametrize("is_accepted", [False, True])
def test_aborting_a_dispatched_request_asks_its_worker(is_accepted: bool) -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate()
    (command,) = worker.take("generate")
    if is_accepted:
        worker.accept(command)
    client.ask("abort", Abort([rid]))
    (abort,) = worker.take("abort")
    body = unpack(abort)
    assert isinstance(body, Abort)
    assert (abort.rid, abort.epoch, body.rids) == ("", worker.epoch, [rid])
    client.take("finished")
    worker.end(command, "cancelled")
    assert client.ending() == ("cancelled", "")


def test_aborting_an_ended_request_changes_nothing() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate()
    worker.end(worker.heard_one("generate"))
    client.take("finished")
    client.ask("abort", Abort([rid]))
    assert worker.take("abort") == []
    assert client.take("cancelled") == []


def test_abort_everything_leaves_other_clients_alone() -> None:
    bus = Bus()
    one, other = bus.client("one"), bus.client("other")
    mine = [one.generate(), one.generate()]
    theirs = other.generate()
    one.ask("abort", Abort(everything=True))
    assert [entry.rid for entry in one.take("cancelled")] == mine
    assert [entry.rid for entry in bus.worker().take("generate")] == [theirs]


def test_work_of_a_client_that_went_silent_is_fenced() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=300)
    worker.accept(*worker.take("generate"))
    client.is_alive = False
    bus.advance(31)
    assert len(worker.take("fenced")) == 1
    worker.running.clear()
    worker.heartbeat()
    assert len(bus.core.table) == 0


def test_unknown_kind_is_refused_by_name() -> None:
    bus = Bus()
    client = bus.client()
    client.ask("transmogrify")
    assert client.ending() == ("refused", "unknown_message")


def test_a_version_that_no_worker_goes_back_to_is_refused_at_once() -> None:
    bus = Bus()
    bus.store(committed={"default": 3})
    bus.worker(version=3)
    client = bus.client()
    client.generate("exact:2", deadline_s=600)
    bus.advance(0.25)
    problem = client.problem()
    assert (problem.code, problem.field) == ("version_unavailable", "place.versions")
    assert "at version 3" in problem.message


def test_a_request_that_waits_is_told_when_its_version_is_retired() -> None:
    bus = Bus()
    bus.store(committed={"default": 2})
    client = bus.client()
    client.generate("exact:2", deadline_s=600)
    client.generate("exact:4", deadline_s=600)
    bus.advance(1)
    assert client.take("refused") == []
    bus.store(committed={"default": 3})
    bus.advance(0.25)
    assert client.ending() == ("refused", "version_unavailable")  # version 4 may come
