"""A failing worker is left alone, then tried with one request at a time."""

from rolloutbus.bus.wire.messages.control import FleetStatus
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.router.health.breaker import Breaker, BreakerSettings
from tests.unit.router.harness import Bus, SimClient, SimWorker

FAILED = Problem("engine_failed", "no", "failed")
BROKEN = Problem("broken_weights", "no", "failed")


def _fail(client: SimClient, worker: SimWorker, problem: Problem = FAILED) -> None:
    client.generate(deadline_s=100)
    worker.end(worker.take("generate")[0], "failed", problem)
    client.acknowledge(client.take("failed")[0])


def _state(bus: Bus) -> str:
    status = bus.core.status(bus.now)
    assert isinstance(status, FleetStatus)
    return status.workers[0].state


def _tripped(bus: Bus) -> tuple[SimClient, SimWorker]:
    worker, client = bus.worker(), bus.client()
    for _ in range(5):
        _fail(client, worker)
    assert _state(bus) == "tripped"
    return client, worker


def test_five_engine_failures_trip_a_worker_and_nothing_goes_there() -> None:
    bus = Bus()
    client, worker = _tripped(bus)
    client.generate()
    bus.advance(9)
    assert worker.take("generate") == []
    assert bus.counters["breaker_opened"] == 1


def test_exactly_one_probe_follows_and_two_successes_close_it() -> None:
    bus = Bus()
    client, worker = _tripped(bus)
    for _ in range(3):
        client.generate(deadline_s=100)
    bus.advance(10.5)
    for _ in range(2):
        assert _state(bus) == "tripped"
        (probe,) = worker.take("generate")
        worker.end(probe)
    assert _state(bus) == "ready"
    client.generate()
    assert len(worker.take("generate")) == 2


def test_a_probe_that_fails_opens_it_again() -> None:
    bus = Bus()
    client, worker = _tripped(bus)
    for _ in range(2):
        client.generate(deadline_s=100)
    bus.advance(10.5)
    worker.end(worker.take("generate")[0], "failed", FAILED)
    bus.advance(9)
    assert worker.take("generate") == []
    bus.advance(1.5)
    assert len(worker.take("generate")) == 1


def test_a_probe_that_told_nothing_is_followed_by_another() -> None:
    bus = Bus()
    client, worker = _tripped(bus)
    for _ in range(2):
        client.generate(deadline_s=100)
    bus.advance(10.5)
    worker.end(worker.take("generate")[0], "cancelled")
    bus.advance(0.5)
    assert len(worker.take("generate")) == 1


def test_bad_requests_say_nothing_about_the_worker() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    for _ in range(20):
        _fail(client, worker, Problem("unsupported", "no", "not_started"))
    assert _state(bus) == "ready"


def test_failures_far_apart_do_not_trip() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    for _ in range(10):
        _fail(client, worker)
        bus.advance(8)
    assert _state(bus) == "ready"


def test_lost_leases_trip_a_worker_that_comes_back_each_time() -> None:
    bus = Bus()
    client = bus.client()
    worker = bus.worker()
    for _ in range(5):
        worker.is_alive = False
        bus.advance(3.5)
        worker.lease_no += 1
        worker.is_alive = True
        worker.hello()
        worker.heartbeat()
    assert _state(bus) == "tripped"
    client.generate()
    assert worker.take("generate") == []


def test_a_worker_that_does_not_answer_commands_fails_but_not_for_want_of_time() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    for _ in range(6):
        client.ask("flush_cache", route="worker:w0", deadline_s=0.5)
        bus.advance(1)
    assert _state(bus) == "ready"
    for _ in range(5):
        client.ask("flush_cache", route="worker:w0", deadline_s=3.5)
        bus.advance(4)
    assert _state(bus) == "tripped"
    assert worker.is_alive


def test_failures_of_broken_weights_end_with_them() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    _fail(client, worker, BROKEN)  # they are committed, and no heartbeat has said so yet
    worker.version = 1
    worker.heartbeat()
    for _ in range(4):
        _fail(client, worker, BROKEN)
    assert _state(bus) == "tripped"
    client.generate(deadline_s=100)
    client.generate(deadline_s=100)
    bus.advance(0.05)
    assert worker.take("generate") == []
    worker.version = 2
    bus.advance(1)
    assert _state(bus) == "ready"
    assert len(worker.take("generate")) == 2


def test_a_broken_adapter_is_no_fault_of_the_worker() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    for _ in range(20):
        _fail(client, worker, Problem("broken_weights", "no", "failed", field="lora"))
    assert _state(bus) == "ready"


def test_other_weights_excuse_no_other_failure() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    for problem in (BROKEN, FAILED, BROKEN, BROKEN, BROKEN):
        _fail(client, worker, problem)
    worker.version = 1
    bus.advance(1)
    assert _state(bus) == "tripped"


def test_a_breaker_without_failures_is_idle_again() -> None:
    breaker = Breaker("w0", BreakerSettings())
    breaker.failed(0.0)
    assert not breaker.is_idle
    breaker.tick(31.0)
    assert breaker.is_idle
