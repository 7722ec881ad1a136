"""What could not be sent to its worker goes to another one at once, and nothing new to that one."""

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.router.events import Returned
from tests.unit.router.harness import Bus, SimWorker


def _returned(bus: Bus, worker: SimWorker, *entries: Entry) -> None:
    """The connection was gone before these left."""
    bus.apply(bus.core.handle(Returned(worker.peer, list(entries)), bus.now))


def test_request_that_did_not_leave_is_given_to_another_worker_at_once() -> None:
    bus = Bus()
    dead, client = bus.worker("w0"), bus.client()
    rid = client.generate(deadline_s=60)
    command = dead.heard_one("generate")
    other = bus.worker("w1")
    _returned(bus, dead, command)
    assert [each.rid for each in other.take("generate")] == [rid]


def test_request_that_was_sent_before_waits_for_the_end_of_the_lease() -> None:
    bus = Bus()
    dead, client = bus.worker("w0"), bus.client()
    client.generate(deadline_s=60)
    bus.advance(1.25)
    command = dead.heard_one("generate")  # sent twice: the first one may have arrived
    other = bus.worker("w1")
    _returned(bus, dead, command)
    assert other.take("generate") == []


def test_worker_that_could_not_be_sent_something_gets_nothing_new_until_it_heartbeats() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=60)
    _returned(bus, worker, worker.heard_one("generate"))
    assert worker.take("generate") == []
    worker.heartbeat()
    assert len(worker.take("generate")) == 1


def test_what_a_client_could_not_be_sent_concerns_no_worker() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    assert bus.core.handle(Returned(client.peer, [Entry("queued")]), bus.now) == []
    client.generate()
    assert len(worker.take("generate")) == 1
