"""Recovery is told from when streams moved, each wait under the fault that caused it."""

import math

from drills.chaos.history import Life
from drills.chaos.records import Ended, Invoked, Progressed
from drills.chaos.recovery import Recovery, Struck, recoveries


def _stream(op: str, *moves: tuple[float, str], begun_at: float = 0.0) -> Life:
    invoked = Invoked(op, begun_at, b"", 0, 9, [], is_streamed=True)
    progressed = [Progressed(op, at, worker, 1) for at, worker in moves[:-1]]
    at, worker = moves[-1]
    return Life([invoked], progressed, [Ended(op, at, "ok", worker=worker)])


def _only(lives: list[Life], *faults: Struck) -> dict[str, tuple[int, float]]:
    found: dict[str, Recovery] = recoveries(lives, faults)
    return {name: (each.n_requests, each.max_ms) for name, each in found.items()}


def test_only_streams_of_the_victim_count() -> None:
    lives = [
        _stream("c0:0:1", (9.0, "w0"), (12.5, "w1")),
        _stream("c0:1:1", (9.0, "w1"), (19.0, "w1")),
    ]
    assert _only(lives, Struck("kill_worker", "w0", 10.0, 10.0)) == {"kill_worker": (1, 2500.0)}


def test_tokens_in_flight_are_no_recovery() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (10.05, "w0"), (13.0, "w1"))]
    assert _only(lives, Struck("kill_host", "w0", 10.0, 10.0)) == {"kill_host": (1, 3000.0)}


def test_stream_that_never_moves_again_is_beyond_every_bound() -> None:
    life = _stream("c0:0:1", (9.0, "w0"), (9.5, "w0"))
    life.ended.clear()
    [found] = recoveries([life], [Struck("stop_worker", "w0", 10.0, 15.0)]).values()
    assert not found.is_within_bound
    assert found.max_ms < math.inf, "JSON has no infinity"


def test_recovery_from_a_router_kill_counts_from_its_return() -> None:
    lives = [
        _stream("c0:0:1", (9.0, "w0"), (12.0, "w0")),
        _stream("c0:1:1", (11.4, "w0"), (12.0, "w0"), begun_at=11.2),
    ]
    struck = Struck("kill_router", "router", 10.0, 11.0)
    assert _only(lives, struck) == {"kill_router": (1, 1000.0), "new_requests": (1, 200.0)}


def test_second_blow_is_not_blamed_on_the_first() -> None:
    lives = [_stream("c0:0:1", (9.0, "w0"), (18.0, "w1"))]
    kill, router = Struck("kill_worker", "w0", 10.0, 10.0), Struck("kill_router", "r", 12.0, 13.0)
    assert set(_only(lives, kill, router)) == {"combined"}
    cut = Struck("partition_client", "c0", 10.1, 17.0)
    assert _only(lives, kill, cut)["combined"][1] == 8000.0
