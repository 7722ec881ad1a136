"""Sessions that were opened: who gets a place, who keeps it, who goes first."""

import math
import random

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import LocalProtocolError
from rolloutbus.bus.wire.messages.generation import Abort, OpenSession
from rolloutbus.bus.wire.messages.membership import Goodbye
from rolloutbus.router.members.records import Reason
from rolloutbus.router.requests.record import SESSION_LIFE, SessionRecord
from tests.unit.router.harness import Bus
from tests.unit.router.session_bench import (
    HOUR_S,
    closed,
    full,
    opened,
    refused,
    sessions,
    turn,
)


def test_more_sessions_than_there_are_places_are_refused_as_busy() -> None:
    bus = Bus(sessions_per_slot=1.5)
    client = bus.client()
    for name in ("w0", "w1"):
        bus.worker(name, slots=2)
    homes = [opened(client, f"s{i}") for i in range(6)]
    assert sorted(homes) == ["w0"] * 3 + ["w1"] * 3
    client.ask("open_session", OpenSession("one-too-many"))
    problem = client.problem()
    assert (problem.code, problem.outcome) == ("busy", "not_started")
    assert problem.retry_after_ms > 0
    assert sessions(bus) == {"w0": 3, "w1": 3}
    assert closed(client, "s0") == ("finished", "")
    assert opened(client, "one-too-many") == homes[0]


def test_a_session_is_refused_while_no_worker_of_its_policy_is_live() -> None:
    bus = Bus()
    client = bus.client()
    bus.worker()
    assert refused(client, policy="other") == "not_ready"


def test_paused_workers_give_places() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    worker.state = "paused"
    worker.heartbeat()
    assert opened(client) == "w0"


def test_the_first_request_goes_where_the_place_is() -> None:
    bus = Bus()
    workers = {f"w{i}": bus.worker(f"w{i}") for i in range(4)}
    client = bus.client()
    for i in range(8):
        home = workers[opened(client, f"s{i}")]
        turn(client, home, f"s{i}")


def test_to_open_again_renews_and_changes_nothing_else() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    assert opened(client, lease_s=10) == "w0"
    for _ in range(4):
        bus.advance(8)
        assert opened(client, lease_s=10) == "w0"
    assert sessions(bus) == {"w0": 1}
    bus.advance(10.5)
    assert sessions(bus) == {}
    assert not worker.take("fenced")


def test_requests_renew_the_lease_and_it_does_not_run_while_one_is_under_way() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    opened(client, lease_s=5)
    for _ in range(3):
        bus.advance(4)
        client.generate(session="agent", deadline_s=HOUR_S)
        command = worker.heard_one("generate")
        worker.accept(command)
        bus.advance(20)
        assert sessions(bus) == {"w0": 1}
        worker.end(command)
        client.acknowledge(client.heard_one("finished"))
    bus.advance(4)
    assert sessions(bus) == {"w0": 1}
    bus.advance(2)
    assert sessions(bus) == {}
    assert bus.core.status(bus.now).counters["sessions_expired"] == 1


def test_the_turn_within_the_grace_goes_before_all_that_wait() -> None:
    bus = Bus(queue_limit=300)
    client, worker = bus.client(), bus.worker()
    opened(client, grace_s=30)
    turn(client, worker)
    full(bus, client, worker, n_waiting=200)
    bus.advance(10)
    rid = client.generate(session="agent")
    assert [command.rid for command in worker.take("generate")] == [rid]
    assert bus.core.status(bus.now).n_queued == 200


def test_a_turn_that_has_to_wait_gets_the_first_place_at_its_worker() -> None:
    bus = Bus()
    client, other, worker = bus.client(), bus.client("other"), bus.worker()
    opened(client)
    for _ in range(16):
        other.generate(session="plain")  # these may queue up to twice the capacity
    taken = worker.take("generate")
    assert len(taken) == 12
    worker.accept(*taken)
    rid = client.generate(session="agent")
    assert worker.take("generate") == []
    worker.end(taken[0])
    assert [command.rid for command in worker.take("generate")] == [rid]


def test_after_the_grace_a_request_waits_for_its_turn_and_likes_its_worker() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    opened(client, grace_s=5)
    turn(client, worker)
    bus.advance(6)
    taken = full(bus, client, worker)
    rid = client.generate(session="agent", deadline_s=HOUR_S)
    assert worker.take("generate") == []
    for command in taken:
        worker.end(command)
    assert rid not in [command.rid for command in worker.take("generate")]
    assert sessions(bus) == {"w0": 1}


def test_only_one_request_of_a_session_goes_first() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    opened(client)
    full(bus, client, worker)
    first = client.generate(session="agent")
    client.generate(session="agent")
    assert [command.rid for command in worker.take("generate")] == [first]


def test_a_turn_does_not_go_before_requests_of_higher_priority() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    opened(client)
    for _ in range(16):
        client.generate(session="plain")
    taken = worker.take("generate")
    worker.accept(*taken)
    client.generate(session="agent")
    urgent = client.generate(session="plain", priority=1)
    worker.end(taken[0])
    assert [command.rid for command in worker.take("generate")] == [urgent]


def test_turns_are_charged_to_the_share_of_their_client() -> None:
    bus = Bus()
    agent, other, worker = bus.client("agent"), bus.client("other"), bus.worker()
    opened(agent)
    taken = full(bus, other, worker, n_waiting=0)
    agent.generate()
    other.generate()
    agent.generate(session="agent", cost=1_000_000)
    assert len(worker.take("generate")) == 1
    worker.end(taken[0])
    worker.end(taken[1])
    assert [command.route for command in worker.take("generate")] == ["other"]


def test_a_turn_that_is_aborted_while_it_waits_leaves_its_session_to_the_lease() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    opened(client, lease_s=5)
    worker.state = "paused"
    worker.heartbeat()
    client.generate(session="agent", deadline_s=HOUR_S)
    bus.advance(10)
    assert sessions(bus) == {"w0": 1}
    client.ask("abort", Abort(everything=True))
    bus.advance(6)
    assert sessions(bus) == {}


def test_sessions_that_nobody_opened_have_no_place_and_no_precedence() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    opened(client, "opened")
    turn(client, worker, "plain")
    full(bus, client, worker)
    client.generate(session="plain")
    assert worker.take("generate") == []
    assert sessions(bus) == {"w0": 1}


def test_close_of_an_unknown_session_is_refused() -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    assert closed(client) == ("refused", "unknown_session")
    opened(client)
    assert closed(client) == ("finished", "")
    assert closed(client) == ("refused", "unknown_session")


def test_a_session_is_its_clients_own() -> None:
    bus = Bus()
    client, thief, worker = bus.client(), bus.client("thief"), bus.worker()
    opened(client)
    assert refused(thief) == "session_taken"
    assert closed(thief) == ("refused", "unknown_session")
    full(bus, client, worker)
    thief.generate(session="agent")
    assert worker.take("generate") == []
    assert sessions(bus) == {"w0": 1}


def test_places_of_a_client_that_left_are_free() -> None:
    bus = Bus(sessions_per_slot=0.1)
    client, other = bus.client(), bus.client("other")
    bus.worker()
    opened(client, lease_s=HOUR_S)
    assert refused(other, "second") == "busy"
    client.say(Entry("goodbye", body=pack(Goodbye("done"))))
    assert opened(other, "second") == "w0"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session": "a b"}, "session"),
        ({"policy": ""}, "policy"),
        ({"worker": "x" * 65}, "worker"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"lease_s": math.nan}, "lease_s"),
        ({"lease_s": 1e9}, "lease_s"),
        ({"grace_s": -1.0}, "grace_s"),
        ({"grace_s": math.inf}, "grace_s"),
    ],
)
def test_values_beyond_their_limits_are_refused(fields: dict[str, float | str], field: str) -> None:
    bus = Bus()
    bus.worker()
    client = bus.client()
    client.ask("open_session", OpenSession(**{"session": "agent", **fields}))  # type: ignore[arg-type]
    problem = client.problem()
    assert (problem.code, problem.field) == ("bad_request", field)


def test_refused_requests_leave_nothing_behind_in_their_session() -> None:
    bus = Bus(queue_limit=1)
    client, worker = bus.client(), bus.worker()
    opened(client, lease_s=5)
    full(bus, client, worker, n_waiting=1)
    for _ in range(20):
        client.generate(session="agent", deadline_s=HOUR_S)
    taken = worker.take("generate")
    for command in taken:
        worker.end(command)
    for ending in client.take("finished"):
        client.acknowledge(ending)
    bus.advance(6)
    assert sessions(bus) == {}


def test_ended_sessions_are_forgotten() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker(slots=100)
    for i in range(500):
        opened(client, f"s{i}", lease_s=1)
        turn(client, worker, f"s{i}")
        closed(client, f"s{i}") if i % 2 else bus.advance(1.5)
    assert sessions(bus) == {}
    assert len(bus.core.affinity.sessions) <= 500


def test_an_event_without_meaning_changes_nothing() -> None:
    session = SessionRecord("agent", "trainer", "default")
    with pytest.raises(LocalProtocolError):
        session.advance("rested twice")
    assert session.state == "held"
    assert set(SESSION_LIFE) == {"held", "active", "resting", "gone"}


def _roomy(bus: Bus) -> dict[str, float]:
    """Workers with room for a session -> how full they are, by a look at all of them."""
    held, per_slot = sessions(bus), bus.core.context.settings.sessions_per_slot
    return {
        each.name: held.get(each.name, 0) / each.slots
        for each in bus.core.context.members.workers("default")
        if not each.blocked_by and held.get(each.name, 0) < max(1, int(each.slots * per_slot))
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_session_opens_where_a_look_at_all_workers_finds_most_room(seed: int) -> None:
    rng = random.Random(seed)
    bus = Bus(seed=seed)
    client, workers, names = bus.client(), [bus.worker("w0", slots=1)], list[str]()
    for n in range(1, 120):
        record = rng.choice(bus.core.context.members.workers() or [None])
        match rng.choice(
            ["joins", "is_lost", "is_blocked", "is_unblocked", *["opens"] * 4, "ends"]
        ):
            case "joins" if len(workers) < 8:
                workers.append(bus.worker(f"w{n}", slots=rng.randint(1, 3)))
            case "is_lost" if len(workers) > 2:
                workers.pop(rng.randrange(len(workers))).is_alive = False
                bus.advance(4)
            case "is_blocked" if record is not None:
                bus.core.context.eligibility.block(record, Reason.TRIPPED)
            case "is_unblocked" if record is not None:
                bus.core.context.eligibility.unblock(record, Reason.TRIPPED)
            case "ends" if names:
                closed(client, names.pop(rng.randrange(len(names))))
            case "opens" if room := _roomy(bus):
                names.append(f"s{n}")
                assert room[opened(client, names[-1], lease_s=HOUR_S)] == min(room.values())
            case _:
                continue
