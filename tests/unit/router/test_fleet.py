"""Commands to members: one result from each, and who stayed silent."""

import pytest

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.commands import COMMAND_OF
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.limits import CHUNK_BYTES, MAX_BODY_BYTES
from rolloutbus.bus.wire.messages.control import FlushCache, Pause, Resume, SaveWeights, ServerInfo
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Repair, Repaired
from rolloutbus.bus.wire.messages.membership import Goodbye
from rolloutbus.bus.wire.messages.weights import Chunk, Reserved, ReserveVersion, Tensor
from tests.unit.router.harness import Bus

RESERVE = ReserveVersion("default", [Tensor("w", "F32", (1,), 0, 4)])


def test_fleet_command_returns_one_result_per_worker() -> None:
    bus = Bus()
    workers = [bus.worker("w0"), bus.worker("w1")]
    client = bus.client()
    client.ask("pause", Pause(), "fleet")
    for worker in workers:
        worker.end(worker.heard_one("pause"), body=Done())
        assert len(worker.take("ack")) == 1
    outcome = client.outcome()
    assert sorted(each.worker for each in outcome.results) == ["w0", "w1"]
    assert outcome.silent == []


def test_answer_waits_for_the_last_worker() -> None:
    bus = Bus()
    first, _second = bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    client.ask("pause", Pause(), "fleet")
    first.end(first.heard_one("pause"), body=Done())
    assert client.take("finished") == []


def test_worker_that_does_not_answer_is_silent_at_the_deadline() -> None:
    bus = Bus()
    first, _second = bus.worker("w0"), bus.worker("w1")
    client = bus.client()
    client.ask("pause", Pause(), "fleet", deadline_s=3)
    first.end(first.heard_one("pause"), body=Done())
    bus.advance(3.5)
    outcome = client.outcome()
    assert [each.worker for each in outcome.results] == ["w0"]
    assert outcome.silent == ["w1"]


def test_lost_worker_is_silent_at_once() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.ask("pause", Pause(), "worker:w0", deadline_s=300)
    worker.is_alive = False
    bus.advance(4)
    assert client.outcome().silent == ["w0"]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [(FlushCache(), "failed"), (SaveWeights("out", "now", "safetensors"), "unknown")],
)
def test_worker_whose_engine_dies_has_failed_at_once(
    body: FlushCache | SaveWeights, outcome: str
) -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.ask(COMMAND_OF[type(body)], body, "worker:w0", deadline_s=300)
    worker.say(
        Entry(
            "goodbye",
            epoch=worker.epoch,
            body=pack(Goodbye("engine_crashed: RuntimeError: a kernel failed")),
        )
    )
    (result,) = client.outcome().results
    problem = unpack(Entry(result.kind, body=result.body))
    assert isinstance(problem, Problem)
    assert (problem.code, problem.outcome) == ("engine_died", outcome)
    assert problem.message.startswith("its engine crashed: RuntimeError: a kernel failed; ")


def test_fleets_pause_is_brought_to_a_worker_whose_engine_dies_meanwhile() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.ask("pause", Pause(), "fleet", deadline_s=300)
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("engine_killed"))))
    outcome = client.outcome()
    assert (outcome.results, outcome.silent) == ([], [])


def test_workers_own_refusal_is_a_result() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.ask("pause", Pause(), "worker:w0")
    problem = Problem("unsupported", "it cannot", "not_started")
    worker.end(worker.heard_one("pause"), "failed", problem)
    assert [each.kind for each in client.outcome().results] == ["failed"]


def test_answers_that_no_frame_can_hold_fail_the_command() -> None:
    bus = Bus()
    workers = [bus.worker(f"w{n}") for n in range(2 * MAX_BODY_BYTES // CHUNK_BYTES)]
    client = bus.client()
    client.ask("server_info", ServerInfo(), "fleet")
    for worker in workers:
        content = Chunk(0, bytes(CHUNK_BYTES // 2))
        worker.end(worker.heard_one("server_info"), body=content)
    assert client.problem().code == "internal"


def test_fleet_command_without_workers_finishes_empty() -> None:
    bus = Bus()
    client = bus.client()
    client.ask("resume", Resume(), "fleet")
    outcome = client.outcome()
    assert (outcome.results, outcome.silent) == ([], [])


def test_unknown_worker_is_refused_naming_the_route() -> None:
    bus = Bus()
    client = bus.client()
    client.ask("pause", Pause(), "worker:nobody")
    problem = client.problem()
    assert (problem.code, problem.field) == ("unknown_worker", "route")
    assert problem.message.endswith("there is no worker")
    bus.worker("w1")
    bus.worker("w0")
    client.ask("pause", Pause(), "worker:nobody")
    assert "no worker 'nobody' is connected; there are w0, w1" in client.problem().message


def test_store_that_is_not_there_is_refused() -> None:
    bus = Bus()
    client = bus.client()
    client.ask("resume", Resume(), "store")
    assert client.problem().code == "no_store"


def test_a_publishers_command_waits_for_a_store_that_comes_back() -> None:
    bus = Bus()
    client = bus.client()
    rid = client.ask("reserve_version", RESERVE, "store", deadline_s=60)
    bus.advance(8)
    client.ask("reserve_version", RESERVE, "store", deadline_s=60, rid=rid)
    store = bus.store()
    bus.advance(1)
    command = store.heard_one("reserve_version")
    assert 40_000 < command.deadline_ms < 53_000
    store.end(command, body=Reserved(1, "host", "segment", 4))
    assert client.ending() == ("finished", "")


def test_and_is_refused_when_it_does_not() -> None:
    bus = Bus()
    client = bus.client()
    client.ask("reserve_version", RESERVE, "store", deadline_s=60)
    bus.advance(9)
    assert client.take("refused") == []
    bus.advance(2)
    assert client.problem().code == "no_store"


def test_command_is_sent_again_until_it_is_accepted() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.ask("pause", Pause(), "fleet", deadline_s=60)
    (first,) = worker.take("pause")
    bus.advance(2)
    (second,) = worker.take("pause")
    assert second.attempt == first.attempt
    worker.accept(second)
    bus.advance(6)
    assert worker.take("pause") == []


def test_same_command_again_is_answered_again_and_not_repeated() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.ask("pause", Pause(), "fleet")
    worker.end(worker.heard_one("pause"), body=Done())
    client.outcome()
    client.ask("pause", Pause(), "fleet", rid=rid)
    assert worker.take("pause") == []
    assert len(client.outcome().results) == 1


def test_the_answer_to_a_repair_is_not_kept_and_can_be_had_again() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    repair = Repair("c/9", (1, 1), 0)
    rid = client.ask("repair", repair, "worker:w0")
    worker.end(worker.heard_one("repair"), body=Repaired(0, b"", b"", []))
    assert len(client.outcome().results) == 1
    client.ask("repair", repair, "worker:w0", rid=rid)
    assert client.take("finished") == []
    worker.end(worker.heard_one("repair"), body=Repaired(0, b"", b"", []))
    assert len(client.outcome().results) == 1


def test_body_that_breaks_its_type_is_refused_naming_the_field() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.ask("pause", Done("no mode"), "fleet")
    assert client.problem().code == "bad_request"
    assert worker.take("pause") == []


def test_ending_sent_again_is_acknowledged_again() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.ask("pause", Pause(), "fleet")
    (command,) = worker.take("pause")
    worker.end(command, body=Done())
    worker.end(command, body=Done())
    assert len(worker.take("ack")) == 2
    assert len(client.outcome().results) == 1
