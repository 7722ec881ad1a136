"""Whatever goes wrong: one outcome for each request, the right tokens, nothing left behind."""

from collections import Counter

import pytest

from tests.simulation.world import run_seed

N_SEEDS, CHUNK = 300, 15
MAX_EXECUTIONS_PER_REQUEST = 1.6
SOMETIMES = (
    "resumed", "several_attempts", "mixed_versions", "cancelled", "adopted", "lost", "fenced",
    "expired_leases", "catch_ups", "repairs", "reconnects", "stale_endings", "own_pauses",
)  # fmt: skip


@pytest.mark.simulation
@pytest.mark.timeout(120)
@pytest.mark.parametrize("start", range(0, N_SEEDS, CHUNK))
def test_every_request_has_one_right_outcome(start: int) -> None:
    reports = [run_seed(seed) for seed in range(start, start + CHUNK)]

    stories = [
        f"seed {report.seed}: {report.violations}" for report in reports if report.violations
    ]
    assert not stories, "\n".join(stories)
    n_executions = sum(report.n_executions for report in reports)
    n_requests = sum(report.n_requests for report in reports)
    assert n_executions / n_requests <= MAX_EXECUTIONS_PER_REQUEST


@pytest.mark.simulation
@pytest.mark.timeout(120)
def test_the_faults_reach_every_protection() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += run_seed(seed).sometimes

    assert [event for event in SOMETIMES if not seen[event]] == []


@pytest.mark.simulation
def test_a_seed_repeats_its_trace() -> None:
    assert run_seed(7).trace == run_seed(7).trace
    assert run_seed(7).trace != run_seed(8).trace
