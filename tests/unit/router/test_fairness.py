"""Who is next when more wait than can run, and who is turned away."""

import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.router.requests.lane import MIN_ENDED, REMEMBERED, Passes, RunPaces, ServiceRate
from rolloutbus.router.settings import RouterSettings
from tests.unit.router.harness import Bus, SimWorker


def _serve_one(worker: SimWorker) -> str:
    """End what the worker has; returns the client of what it gets next."""
    worker.end(worker.take("generate")[0])
    return next(each.route for each in worker.heard if each.kind == "generate")


def _full(bus: Bus) -> SimWorker:
    """A worker with one free place."""
    worker = bus.worker(slots=1)
    filler = bus.client("filler")
    filler.generate(deadline_s=1000)
    worker.accept(*worker.take("generate"))
    return worker


def test_an_evaluation_is_served_next_behind_thousands_of_rollouts_of_another_client() -> None:
    bus = Bus(queue_limit=10_000)
    worker = _full(bus)
    trainer, evaluation = bus.client("trainer"), bus.client("evaluation")
    for _ in range(2000):
        trainer.generate(deadline_s=1000)
    served = [_serve_one(worker)]
    evaluation.generate(deadline_s=1000)
    served += [_serve_one(worker) for _ in range(2)]
    assert "evaluation" in served


def test_an_evaluation_in_another_lane_is_served_next_too() -> None:
    bus = Bus(queue_limit=10_000)
    worker = _full(bus)
    trainer, evaluation = bus.client("trainer"), bus.client("evaluation")
    for _ in range(100):
        trainer.generate(deadline_s=1000)
    evaluation.generate("latest", deadline_s=1000)
    assert "evaluation" in [_serve_one(worker) for _ in range(2)]


def test_clients_take_turns_by_cost() -> None:
    bus = Bus(queue_limit=100)
    worker = _full(bus)
    long, short = bus.client("long"), bus.client("short")
    for _ in range(20):
        long.generate(deadline_s=1000, cost=30)
        short.generate(deadline_s=1000, cost=10)
    served = [_serve_one(worker) for _ in range(20)]
    assert served.count("long") == 5
    assert served.count("short") == 15


def test_a_client_with_twice_the_weight_gets_twice_as_much() -> None:
    bus = Bus(queue_limit=100, client_weights={"heavy": 2.0})
    worker = _full(bus)
    heavy, light = bus.client("heavy"), bus.client("light")
    for _ in range(20):
        light.generate(deadline_s=1000)
        heavy.generate(deadline_s=1000)
    served = [_serve_one(worker) for _ in range(18)]
    assert served.count("heavy") == 12


def test_priority_goes_before_turns() -> None:
    bus = Bus(queue_limit=100)
    worker = _full(bus)
    first, second = bus.client("first"), bus.client("second")
    for _ in range(5):
        second.generate(deadline_s=1000)
        first.generate(deadline_s=1000, priority=1)
    assert [_serve_one(worker) for _ in range(5)] == ["first"] * 5


def test_one_client_is_served_in_order_of_arrival() -> None:
    bus = Bus(queue_limit=100)
    worker = _full(bus)
    client = bus.client()
    rids = [client.generate(deadline_s=1000, cost=n) for n in (50, 1, 7)]
    seen: list[str] = []
    for _ in rids:
        (command,) = worker.take("generate")
        seen.append(command.rid)
        worker.end(command)
    assert seen == rids


def test_an_idle_client_cannot_save_up_turns() -> None:
    turns = Passes({})
    for _ in range(100):
        turns.charge("busy", 10)
    turns.charge("idle", 10)
    assert turns.of("idle") == turns.of("busy")


def test_clients_that_the_clock_has_overtaken_are_forgotten() -> None:
    turns = Passes({})
    for number in range(2 * REMEMBERED):
        turns.charge(f"c{number}", 1)
        turns.charge("busy", 1)
    assert len(turns) <= REMEMBERED + 1


def test_a_full_queue_makes_room_for_a_client_below_its_share() -> None:
    bus = Bus(queue_limit=4)
    greedy, modest = bus.client("greedy"), bus.client("modest")
    rids = [greedy.generate() for _ in range(4)]
    modest.generate()
    assert modest.take("refused") == []
    (refused,) = greedy.take("refused")
    assert refused.rid == rids[-1]
    modest.generate()
    assert modest.take("refused") == []
    modest.generate()
    assert modest.problem().code == "busy"
    assert bus.counters["busy_refused"] == 3


def test_bodies_are_bounded_in_bytes() -> None:
    bus = Bus(queue_bytes=2)  # a body of the harness has one byte
    client = bus.client()
    for _ in range(2):
        client.generate()
    assert client.take("refused") == []
    client.generate()
    assert client.problem().code == "busy"
    bus.advance(11)
    assert bus.core.table.waiting.n_bytes == 0


def test_request_that_cannot_start_in_time_is_refused_at_once_with_the_estimate() -> None:
    bus = Bus(queue_limit=1000)
    worker = _full(bus)
    client = bus.client()
    for _ in range(400):
        client.generate(deadline_s=1000)
    for _ in range(6):  # ten in a second
        for _ in range(10):
            _serve_one(worker)
        bus.advance(1)
    client.take("queued")
    client.generate(deadline_s=5)
    problem = client.problem()
    assert problem.code == "busy"
    assert "has to start within" in problem.message
    assert 200 <= problem.retry_after_ms <= 400
    client.generate(deadline_s=60)
    assert client.take("refused") == []


def test_a_client_that_has_nothing_waiting_is_not_told_to_wait_for_the_others() -> None:
    bus = Bus(queue_limit=1000)
    worker = _full(bus)
    trainer, evaluation = bus.client("trainer"), bus.client("evaluation")
    for _ in range(400):
        trainer.generate(deadline_s=1000)
    for _ in range(6):
        for _ in range(10):
            _serve_one(worker)
        bus.advance(1)
    evaluation.generate(deadline_s=1)
    assert evaluation.take("refused") == []


def test_nobody_is_refused_on_a_guess() -> None:
    bus = Bus(queue_limit=1000)
    _full(bus)
    client = bus.client()
    for _ in range(500):
        client.generate(deadline_s=0.5)
    assert client.take("refused") == []


def test_a_pause_does_not_lower_the_estimated_rate() -> None:
    rate = ServiceRate()
    for tenth in range(30):
        rate.started(100 + tenth / 10)
    assert rate.per_s(107.0) == 15
    assert rate.per_s(120.0) is None


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_must_be_positive(weight: float) -> None:
    with pytest.raises(SettingsError, match="client_weights"):
        RouterSettings("ipc:///a", "ipc:///b", client_weights={"c": weight})


def test_a_turn_that_comes_too_late_to_run_as_long_as_the_others_is_given_to_the_next() -> None:
    bus = Bus(queue_limit=100)
    worker = _full(bus)
    client = bus.client()
    for _ in range(MIN_ENDED + 1):
        client.generate(deadline_s=1000)
    hasty = client.generate(deadline_s=2 * (MIN_ENDED + 1) + 1)
    patient = client.generate(deadline_s=1000)
    for _ in range(MIN_ENDED + 1):  # each runs for two seconds
        bus.advance(2)
        worker.end(worker.take("generate")[0])
    assert [each.rid for each in client.take("expired")] == [hasty]
    assert [each.rid for each in worker.take("generate")] == [patient]


def test_the_pace_is_that_of_the_fastest_of_late() -> None:
    pace = RunPaces()
    assert pace.least_s("p", 100) == 0.0  # nothing is known
    pace.ended("p", 100, 1.0)
    for _ in range(MIN_ENDED - 2):
        pace.ended("p", 100, 2.0)
    assert pace.least_s("p", 100) == 0.0  # too little is known
    pace.ended("p", 100, 1.0)
    assert pace.least_s("p", 200) == pytest.approx(2.0)
    for _ in range(200):
        pace.ended("p", 100, 4.0)
    assert pace.least_s("p", 100) == pytest.approx(4.0)
