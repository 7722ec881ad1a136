"""Whatever goes wrong: one outcome for each request, the right tokens, nothing left behind."""

import pytest

from tests.drills.simulation.campaign import MAX_EXECUTIONS_PER_REQUEST, run_seeds
from tests.drills.simulation.runs import run_seed
from tests.drills.simulation.scenario import (
    BARRIER,
    BLINKING,
    DESERTED,
    FORSAKEN,
    HAUNTED,
    PAIRED,
    SUCCEEDED,
    Scenario,
)

N_SEEDS, CHUNK = 300, 30
EVENTFUL_SEEDS = 40
HALVES = pytest.mark.parametrize("start", [0, CHUNK])
ONCE_BROKEN: list[tuple[Scenario, int]] = [
    *((Scenario(), seed) for seed in (1073, 2137)),
    *((HAUNTED, seed) for seed in (194, 5020, 5043)),
    *((BLINKING, seed) for seed in (45, 5047, 5056, 5067)),
    *((DESERTED, seed) for seed in (81, 5046)),
    *((SUCCEEDED, seed) for seed in (119, 121, 173)),
    *((PAIRED, seed) for seed in (134, 321, 2047)),
    *((FORSAKEN, seed) for seed in (7, 14, 49, 1778, 1967, 2389, 3494)),
]
"""They were rare, and may show that something comes back."""


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", range(0, N_SEEDS, CHUNK))
def test_every_request_has_one_right_outcome(start: int) -> None:
    summary = run_seeds(start, CHUNK)

    stories = [
        "\n".join([f"seed {each.seed}", *each.violations, *each.story])
        for each in summary.failing_seeds
    ]
    assert not stories, "\n\n".join(stories)
    assert summary.executions_per_request <= MAX_EXECUTIONS_PER_REQUEST


@pytest.mark.simulation
@pytest.mark.timeout(900)
def test_leases_that_end_all_the_time_and_frames_that_come_again_change_nothing() -> None:
    summary = run_seeds(0, CHUNK, HAUNTED)

    assert [(each.seed, each.violations) for each in summary.failing_seeds] == []


@pytest.mark.simulation
@pytest.mark.timeout(900)
def test_detached_requests_of_clients_that_die_are_collected_by_the_next_ones() -> None:
    summary = run_seeds(0, CHUNK // 2, DESERTED)

    assert [(each.seed, each.violations) for each in summary.failing_seeds] == []
    assert summary.sometimes["detached_collected"] > CHUNK // 2


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.sampled(1)
@HALVES
def test_detached_requests_end_once_though_old_executions_of_them_come_back(
    start: int,
) -> None:
    summary = run_seeds(start, CHUNK, FORSAKEN)

    assert [(each.seed, each.violations) for each in summary.failing_seeds] == []
    assert summary.sometimes["detached_collected"] > CHUNK


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.sampled(1)
@HALVES
def test_nobody_begins_anything_while_the_fleet_is_paused_whoever_dies(
    start: int,
) -> None:
    summary = run_seeds(start, CHUNK, BARRIER)

    assert [(each.seed, each.violations) for each in summary.failing_seeds] == []
    assert summary.sometimes["pauses"] > CHUNK // 2


@pytest.mark.simulation
@pytest.mark.timeout(900)
def test_a_second_fleet_at_the_address_goes_on_with_nothing_of_the_first() -> None:
    summary = run_seeds(0, CHUNK, SUCCEEDED)

    assert [(each.seed, each.violations) for each in summary.failing_seeds] == []
    assert summary.sometimes["held_back"] > CHUNK
    assert summary.sometimes["other_fleet"] > CHUNK


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.sampled(1)
@HALVES
def test_a_pair_of_routers_is_one_router_for_requests_and_members(start: int) -> None:
    summary = run_seeds(start, CHUNK // 2, PAIRED)

    assert [(each.seed, each.violations) for each in summary.failing_seeds] == []
    assert summary.sometimes["takeovers"] > CHUNK // 2
    assert summary.sometimes["routers_stood_down"] > CHUNK // 6


@pytest.mark.simulation
@pytest.mark.timeout(900)
def test_seeds_that_once_broke_a_promise_keep_it() -> None:
    broken = {
        each.seed: each.violations
        for each in (run_seed(seed, scenario) for scenario, seed in ONCE_BROKEN)
        if each.violations
    }
    assert broken == {}


@pytest.mark.simulation
@pytest.mark.timeout(900)
def test_the_faults_reach_every_protection() -> None:
    usual, deserted = run_seeds(0, EVENTFUL_SEEDS), run_seeds(0, CHUNK // 2, DESERTED)

    assert set(usual.never_seen) & set(deserted.never_seen) == set()
    assert [(each.seed, each.violations) for each in deserted.failing_seeds] == []
