"""Faults come from the seed, in their shares."""

from collections import Counter
from random import Random

from tests.drills.chaos.schedule import draw_salvos


def test_same_seed_draws_the_same_faults() -> None:
    assert draw_salvos(Random(5), 40, 60.0) == draw_salvos(Random(5), 40, 60.0)
    assert draw_salvos(Random(5), 40, 60.0) != draw_salvos(Random(6), 40, 60.0)


def test_shares_are_exact(seed: int) -> None:
    salvos = draw_salvos(Random(seed), 200, 260.0)
    counts = Counter(fault.kind for salvo in salvos for fault in salvo.faults)
    assert counts["kill_worker"] + counts["kill_host"] + counts["kill_client"] == 80
    assert counts["stop_worker"] + counts["stop_host"] + counts["stop_router"] == 60
    assert counts["partition_worker"] + counts["partition_client"] == 40
    assert counts["kill_router"] == 20


def test_few_faults_can_be_drawn(seed: int) -> None:
    for n_faults in range(1, 20):
        salvos = draw_salvos(Random(seed + n_faults), n_faults, 30.0)
        assert sum(len(salvo.faults) for salvo in salvos) == n_faults


def test_faults_fit_the_time_they_are_given(seed: int) -> None:
    salvos = draw_salvos(Random(seed), 40, 20.0)
    assert sum(len(salvo.faults) for salvo in salvos) == 40
    times = [salvo.at_s for salvo in salvos]
    assert times == sorted(times)
    assert times[-1] < 20.0
    faults = [fault for salvo in salvos for fault in salvo.faults]
    assert 0.0 < max(fault.duration_s for fault in faults) < 20.0 / 4
