"""What becomes of executions: accepted, ended, lost, fenced, adopted."""

import pytest

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Accepted, Fenced, Lost
from tests.unit.router.harness import Bus, SimClient, SimWorker


def _running(bus: Bus) -> tuple[SimClient, SimWorker, Entry]:
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=60)
    (command,) = worker.take("generate")
    worker.accept(command)
    return client, worker, command


def _in_a_new_epoch(bus: Bus) -> tuple[SimClient, SimWorker, Entry]:
    """A command that the worker had in the epoch before."""
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=60)
    (command,) = worker.take("generate")
    worker.lease_no += 1
    worker.hello()
    return client, worker, command


def test_accepted_is_passed_on_with_the_workers_name() -> None:
    bus = Bus()
    client, _, command = _running(bus)
    (accepted,) = client.take("accepted")
    assert accepted.route == "w0"
    client.heard.append(accepted)
    body = client.take_body("accepted")
    assert isinstance(body, Accepted)
    assert body.items == [(command.rid, command.attempt)]


@pytest.mark.parametrize("is_accepted", [False, True])
def test_death_of_a_worker_requeues_the_unconfirmed_and_reports_the_others_lost(
    is_accepted: bool,
) -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate(deadline_s=60)
    (command,) = worker.take("generate")
    if is_accepted:
        worker.accept(command)
    worker.is_alive = False
    bus.advance(4)
    again = bus.worker("w1").take("generate")
    if is_accepted:
        lost = client.take_body("lost")
        assert isinstance(lost, Lost)
        assert (lost.items, lost.worker) == ([(rid, command.attempt)], "w0")
        assert again == []
    else:
        assert client.take("lost") == []
        assert [each.rid for each in again] == [rid]
        assert again[0].attempt > command.attempt


def test_requeued_request_moves_to_a_living_worker() -> None:
    bus = Bus()
    dying, client = bus.worker("w0"), bus.client()
    rid = client.generate(deadline_s=60)
    dying.is_alive = False
    other = bus.worker("w1")
    bus.advance(4)
    assert other.heard_one("generate").rid == rid


def test_ended_but_unacknowledged_result_of_a_dead_worker_is_lost() -> None:
    bus = Bus()
    client, worker, command = _running(bus)
    worker.end(command)
    worker.is_alive = False
    bus.advance(4)
    assert len(client.take("lost")) == 1
    assert len(bus.core.table) == 0


def test_ending_of_an_older_attempt_is_fenced() -> None:
    client, worker, first = _in_a_new_epoch(Bus())
    worker.heartbeat()
    (second,) = worker.take("generate")
    worker.end(first)
    fenced = worker.take_body("fenced")
    assert isinstance(fenced, Fenced)
    assert fenced.items == [(first.rid, first.attempt)]
    assert client.take("finished") == []
    worker.end(second)
    assert len(client.take("finished")) == 1


def test_acceptance_of_an_older_attempt_is_fenced() -> None:
    client, worker, first = _in_a_new_epoch(Bus())
    worker.accept(first)
    assert len(worker.take("fenced")) == 1
    assert client.take("accepted") == []


def test_ending_sent_again_is_forwarded_again() -> None:
    bus = Bus()
    client, worker, command = _running(bus)
    worker.end(command)
    worker.end(command)
    assert len(client.take("finished")) == 2


def test_ending_of_an_unknown_request_goes_to_the_client_it_names() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    worker.end(Entry("generate", "trainer/77", (1, 9), route="trainer"))
    (ending,) = client.take("finished")
    assert (ending.rid, ending.route) == ("trainer/77", "w0")


def test_execution_missing_from_a_heartbeat_is_declared_lost() -> None:
    bus = Bus()
    client, worker, command = _running(bus)
    worker.running.clear()
    worker.heartbeat()
    lost = client.take_body("lost")
    assert isinstance(lost, Lost)
    assert lost.items == [(command.rid, command.attempt)]


def test_execution_in_the_outbox_of_a_heartbeat_is_not_lost() -> None:
    bus = Bus()
    client, worker, command = _running(bus)
    worker.running.clear()
    worker.outbox = [(command.rid, command.attempt, "trainer")]
    worker.heartbeat()
    assert client.take("lost") == []


def test_unconfirmed_request_missing_from_a_heartbeat_is_not_lost() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate()
    worker.heartbeat()
    assert client.take("lost") == []


def test_running_execution_the_router_placed_elsewhere_is_fenced() -> None:
    bus = Bus()
    _, _, command = _running(bus)
    other = bus.worker("w1")
    other.running = [(command.rid, (1, 0), "trainer")]
    other.heartbeat()
    assert len(other.take("fenced")) == 1


def test_place_is_free_again_after_an_ending() -> None:
    bus = Bus()
    worker, client = bus.worker(slots=1), bus.client()
    for _ in range(20):
        client.generate()
        (command,) = worker.take("generate")
        worker.end(command)
        client.acknowledge(client.heard_one("finished"))
    record = bus.core.context.members.named("w0")
    assert record is not None
    assert (len(record.requests), record.outstanding_cost) == (0, 0)
