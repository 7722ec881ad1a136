"""Recovery is told from when streams moved, each wait under the fault that caused it."""

import math

from tests.drills.chaos.history import Life
from tests.drills.chaos.records import Ended, Invoked, Progressed
from tests.drills.chaos.recovery import Recovery, Struck, recoveries
from tests.drills.chaos.router_recovery import router_recovery
from tests.drills.chaos.schedule import SHARES


def _stream(op: str, *moves: tuple[float, str], begun_at: float = 0.0) -> Life:
    invoked = Invoked(op, begun_at, b"", 0, 9, [], is_streamed=True)
    progressed = [Progressed(op, at, worker, 1) for at, worker in moves[:-1]]
    at, worker = moves[-1]
    return Life([invoked], progressed, [Ended(op, at, "ok", worker=worker)])


def _only(lives: list[Life], *faults: Struck) -> dict[str, tuple[int, float]]:
    found: dict[str, Recovery] = recoveries(lives, faults)
    return {name: (each.n_streams, each.max_ms) for name, each in found.items()}


KILL = Struck("kill_worker", "w0", 10.0, 10.0)


def test_only_streams_of_the_victim_count() -> None:
    lives = [
        _stream("c0:0:1", (9.0, "w0"), (12.5, "w1")),
        _stream("c0:1:1", (9.0, "w1"), (19.0, "w1")),
    ]
    assert _only(lives, KILL) == {"kill_worker": (1, 2500.0)}


def test_tokens_in_flight_are_no_recovery() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (10.05, "w0"), (13.0, "w1"))]
    assert _only(lives, Struck("kill_host", "w0", 10.0, 10.0)) == {"kill_host": (1, 3000.0)}


def test_stream_that_never_moves_again_is_beyond_every_bound() -> None:
    life = _stream("c0:0:1", (9.0, "w0"), (9.5, "w0"))
    life.ended.clear()
    [found] = recoveries([life], [Struck("stop_worker", "w0", 10.0, 15.0)]).values()
    assert not found.is_within_bound
    assert found.max_ms < math.inf, "JSON has no infinity"


def test_stream_of_a_killed_client_is_not_waited_for() -> None:
    life = _stream("c0:0:1", (9.0, "w0"), (9.5, "w0"))
    life.ended.clear()
    life.is_excused = True
    assert _only([life], KILL) == {}


def test_stall_counts_from_the_blow_also_where_recovery_does_not() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (21.0, "w0"))]
    [found] = recoveries(lives, [Struck("stop_host", "w0", 10.0, 20.0)]).values()
    assert (found.max_ms, found.stall_p99_ms) == (1000.0, 11000.0)


def test_wait_that_a_second_blow_cut_short_counts_under_the_second_only() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (16.0, "w1"))]
    router = Struck("kill_router", "router", 12.0, 13.0)
    found = recoveries(lives, [KILL, router])
    assert set(found) == {"kill_router"}, "the kill has no wait of its own"
    assert found["kill_router"].max_ms == 3000.0
    assert _only(lives, KILL, Struck("stop_host", "w1", 10.5, 15.9)) == {}


def test_wait_that_was_too_long_before_the_second_blow_is_held_against_the_first() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (26.0, "w1"))]
    found = recoveries(lives, [KILL, Struck("partition_client", "c0", 17.0, 25.0)])
    assert (found["kill_worker"].max_ms, found["kill_worker"].is_within_bound) == (7000.0, False)
    assert found["partition_client"].max_ms == 1000.0


def test_worker_that_a_stream_went_to_before_the_blow_was_in_its_way_since_then() -> None:
    lives = [_stream("c0:0:1", (4.95, "w0"), (15.9, "w1"))]
    salvo = [Struck("kill_host", "w0", 5.0, 5.0), Struck("stop_host", "w1", 5.0, 15.8)]
    assert _only(lives, *salvo, KILL) == {}, "at 10 it had long left w0"


def test_blow_to_others_is_no_excuse() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (18.0, "w1"))]
    others = [
        Struck("partition_client", "c1", 10.1, 17.0),
        Struck("kill_worker", "w2", 11.0, 11.0),
        Struck("stop_host", "w1", 3.0, 17.0),
    ]
    assert _only(lives, KILL, *others)["kill_worker"] == (1, 8000.0)


def test_every_kind_of_fault_has_a_bound_but_the_loss_of_a_client() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (60.0, "w1"))]
    without = [kind for kind in SHARES if not recoveries(lives, [Struck(kind, "w0", 10.0, 10.0)])]
    assert sorted(without) == ["kill_client", "partition_client"]


def test_router_is_judged_by_its_old_requests_and_its_new_ones() -> None:
    lives = [
        _stream("c0:0:1", (9.0, "w0"), (12.0, "w0"), (13.0, "w0")),
        _stream("c0:1:1", (11.4, "w0"), (12.0, "w0"), begun_at=11.2),
        _stream("c0:2:1", (11.7, "w0"), (12.0, "w0"), begun_at=10.3),
    ]
    found = router_recovery(lives, [Struck("kill_router", "router", 10.0, 11.0)])
    assert found.restart is not None
    assert found.restart.max_ms == 1000.0
    assert found.first_new is not None
    assert found.first_new.max_ms == 200.0
    assert found.new is not None
    assert (found.new.n, found.new.max_ms) == (2, 700.0)
    assert found.old_moved is not None
    assert (found.old_moved.n, found.old_moved.max_ms) == (1, 1000.0)
    assert found.old_ended is not None
    assert found.old_ended.max_ms == 2000.0


def test_new_requests_say_nothing_of_a_kill_that_did_not_come_alone() -> None:
    lives = [_stream("c0:1:1", (18.4, "w0"), (19.0, "w0"), begun_at=11.2)]
    router = Struck("kill_router", "router", 10.0, 11.0)
    assert router_recovery(lives, [router, Struck("kill_host", "w1", 8.0, 8.0)]).new is None
    assert router_recovery(lives, [router]).new is not None
