"""Sessions whose worker cannot take them: who waits, who moves, who is told."""

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Lost, Problem
from rolloutbus.bus.wire.messages.generation import CloseSession, OpenSession
from rolloutbus.bus.wire.messages.membership import Goodbye
from tests.unit.router.harness import Bus
from tests.unit.router.session_bench import HOUR_S, full, moves, opened, sessions, turn


def test_a_lost_worker_moves_its_sessions_and_says_so_once_to_their_client() -> None:
    bus = Bus()
    client, other, first = bus.client(), bus.client("other"), bus.worker("w0")
    opened(client)
    turn(client, first)
    second = bus.worker("w1")
    first.is_alive = False
    bus.advance(4)
    assert moves(client) == [("w0", "w1", "lost")]
    turn(client, second)
    assert moves(client) == []
    assert moves(other) == []
    assert sessions(bus) == {"w1": 1}


def test_the_turn_that_was_lost_with_its_worker_goes_first_at_the_next_one() -> None:
    bus = Bus()
    client, first = bus.client(), bus.worker("w0")
    opened(client)
    rid = client.generate(session="agent", deadline_s=HOUR_S)
    first.accept(first.heard_one("generate"))
    second = bus.worker("w1")
    first.is_alive = False
    bus.advance(4)
    lost = client.take_body("lost")
    assert isinstance(lost, Lost)
    assert [item[0] for item in lost.items] == [rid]
    full(bus, client, second)
    client.submit(rid, session="agent")
    assert [command.rid for command in second.take("generate")] == [rid]
    assert moves(client) == [("w0", "w1", "lost")]


def test_a_session_without_any_worker_left_keeps_waiting_and_is_told_where_it_goes() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker("w0")
    opened(client)
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("engine_crashed"))))
    rid = client.generate(session="agent")
    assert moves(client) == []
    worker.lease_no += 1
    worker.hello()
    worker.heartbeat()
    assert [command.rid for command in worker.take("generate")] == [rid]
    assert moves(client) == [("w0", "w0", "lost")]


@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_a_turn_waits_a_moment_for_a_worker_that_may_return_and_then_moves(state: str) -> None:
    bus = Bus()
    client, first = bus.client(), bus.worker("w0")
    opened(client)
    turn(client, first)
    first.state = state
    first.heartbeat()
    second = bus.worker("w1")
    client.generate(session="agent")
    assert second.take("generate") == []
    bus.advance(1.5)
    assert len(second.take("generate")) == 1
    assert moves(client) == [("w0", "w1", state)]


def test_turns_stay_where_they_are_when_the_fleet_is_paused_and_resumes_one_by_one() -> None:
    bus = Bus()
    client = bus.client()
    workers = {f"w{i}": bus.worker(f"w{i}") for i in range(2)}
    homes = {f"s{i}": workers[opened(client, f"s{i}")] for i in range(4)}
    for worker in workers.values():
        worker.state = "paused"
        worker.heartbeat()
    rids = {client.generate(session=name): home for name, home in homes.items()}
    bus.advance(0.5)
    for worker in workers.values():
        worker.state = "ready"
        worker.heartbeat()
    for worker in workers.values():
        taken = {command.rid for command in worker.take("generate")}
        assert taken == {rid for rid, home in rids.items() if home is worker}
    assert moves(client) == []


def test_a_worker_that_drains_is_not_waited_for() -> None:
    bus = Bus()
    client, first = bus.client(), bus.worker("w0")
    opened(client)
    first.state = "draining"
    first.heartbeat()
    turn(client, bus.worker("w1"))
    assert moves(client) == [("w0", "w1", "draining")]


def test_a_worker_that_failed_too_often_is_not_waited_for() -> None:
    bus = Bus()
    client, first = bus.client(), bus.worker("w0")
    opened(client)
    for _ in range(5):
        client.generate(session="agent")
        command = first.heard_one("generate")
        first.accept(command)
        first.end(command, "failed", Problem("engine_failed", "it broke", "failed"))
        client.acknowledge(client.heard_one("failed"))
    turn(client, bus.worker("w1"))
    assert moves(client) == [("w0", "w1", "tripped")]


def test_a_turn_that_asks_for_weights_its_worker_lacks_moves() -> None:
    bus = Bus()
    client, old = bus.client(), bus.worker("w0", version=1)
    opened(client)
    new = bus.worker("w1", version=2)
    client.generate("min:2", session="agent")
    bus.advance(1.5)
    assert old.take("generate") == []
    assert len(new.take("generate")) == 1
    assert moves(client) == [("w0", "w1", "version")]


def test_a_recovering_router_believes_where_sessions_were() -> None:
    bus = Bus(recovered=False)
    client = bus.client()
    assert opened(client, "a", worker="w1") == "w1"
    workers = {name: bus.worker(name) for name in ("w0", "w1")}
    assert opened(client, "b", worker="w0") == "w0"
    turn(client, workers["w1"], "a")
    turn(client, workers["w0"], "b")
    assert moves(client) == []


def test_a_request_that_a_worker_still_runs_after_a_restart_belongs_to_its_session_again() -> None:
    bus = Bus(recovered=False)
    client, worker = bus.client(), bus.worker()
    rid = client.next_rid()
    worker.running = [(rid, (0, 1), client.name)]
    worker.heartbeat()
    opened(client, worker="w0", lease_s=1)
    client.submit(rid, session="agent", resend=True)
    bus.advance(3)
    assert sessions(bus) == {"w0": 1}
    worker.running = []
    worker.say(Entry("finished", rid, (0, 1), worker.epoch, client.name))
    bus.advance(2)
    assert sessions(bus) == {}


def test_a_session_is_told_when_it_comes_back_to_another_worker() -> None:
    bus = Bus()
    client = bus.client()
    bus.worker("w1")
    assert opened(client, worker="w0") == "w1"
    assert moves(client) == [("w0", "w1", "lost")]


def test_a_turn_that_waits_for_its_worker_goes_anywhere_once_its_session_is_closed() -> None:
    bus = Bus(sessions_per_slot=2)
    client, first = bus.client(), bus.worker("w0", slots=1)
    for session in ("chat", "talk"):
        client.ask("open_session", OpenSession(session, lease_s=HOUR_S, grace_s=HOUR_S))
    for session in ("", "", "chat", "chat"):  # no more may queue there
        client.generate(session=session, deadline_s=HOUR_S)
    rid = client.generate(session="talk", deadline_s=HOUR_S)
    assert rid not in [each.rid for each in first.take("generate")]
    idle = bus.worker("w1", slots=4)
    assert not idle.take("generate")
    client.ask("close_session", CloseSession("talk"))
    assert [each.rid for each in idle.take("generate")] == [rid]
