"""Whatever is broken on purpose, every request of every client is accounted for.

Numbers of recovery are printed, not judged: they depend on who else uses this machine. What is
asserted of them would be false on a slow machine only if work had stopped for good.
"""

import json
import os
from pathlib import Path

import pytest

from tests.drills.chaos.run import Report, run_chaos
from tests.drills.chaos.settings import ChaosSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GIVEN_UP_S = 60.0
"""Twelve times the bound of a worker's recovery."""


def _assert_all_accounted_for(report: Report) -> None:
    print(json.dumps({"recovery": _plain(report), "load": os.getloadavg()}))
    found = (report.lost, report.duplicated, report.wrong_tokens, report.stale, report.failed)
    assert found == (0, 0, 0, 0, 0), "\n".join(report.stories)
    assert report.poisoned == 0, "a request was blamed for what was done to its worker"
    assert report.surprises == []


def _plain(report: Report) -> dict[str, tuple[float, float]]:
    return {name: (each.p99_ms, each.bound_ms) for name, each in report.recovery.by_fault.items()}


async def test_faults_lose_nothing_and_double_nothing(
    tmp_path: Path, seed: int, is_exhaustive: bool
) -> None:
    n_faults = 40 if is_exhaustive else 20
    settings = ChaosSettings(
        seed=seed,
        faults=n_faults,
        clients=10,
        open_requests=80,
        workers=4,
        minutes=1.1 if is_exhaustive else 0.6,
        deadline_s=120.0,
        client_processes=1,
        directory=str(tmp_path / "run"),
    )
    report = await run_chaos(settings)
    _assert_all_accounted_for(report)
    assert sum(report.faults.values()) == n_faults
    assert report.requests > report.open_requests, "nobody asked twice: the run tested nothing"
    assert report.moved > 0, "nothing ever moved: the run tested nothing"
    assert report.updates[1] > 0, "no weights were ever published: the run tested nothing"
    for name, each in report.recovery.by_fault.items():
        assert each.p99_ms < GIVEN_UP_S * 1e3, name


async def test_real_model_says_the_same_while_its_workers_are_broken(
    tmp_path: Path, tiny_model: Path, seed: int, is_exhaustive: bool
) -> None:
    settings = ChaosSettings(
        seed=seed,
        faults=6 if is_exhaustive else 3,
        clients=4,
        open_requests=8,
        workers=2,
        minutes=1.0 if is_exhaustive else 0.6,
        deadline_s=150.0,
        engine="transformers",
        model=str(tiny_model),
        client_processes=1,
        directory=str(tmp_path / "run"),
    )
    report = await run_chaos(settings)
    _assert_all_accounted_for(report)
    assert report.ok > 0
