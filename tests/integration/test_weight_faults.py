"""Whoever dies in whatever phase of a weight update, no token is mixed up and everybody is back.

Times are printed, and only whatever stood still until its deadline is wrong here: the others
depend on who else uses this machine. `make weight-faults` runs the whole matrix and judges them.
"""

import os
from pathlib import Path

import pytest

from tests.drills.weights.cases import PAIRS
from tests.drills.weights.run import run_weight_faults
from tests.drills.weights.settings import WeightDrillSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

N_ALL, N_SAMPLED = 60, len(PAIRS)
"""Deaths: in a sample, each victim dies once in each phase."""


async def test_deaths_mix_up_nothing_and_leave_nothing_behind(
    tmp_path: Path, seed: int, is_exhaustive: bool
) -> None:
    n_kills = N_ALL if is_exhaustive else N_SAMPLED
    settings = WeightDrillSettings(seed=seed, cases=n_kills, directory=str(tmp_path / "run"))
    report = await run_weight_faults(settings, print)
    repeat = f"python -m tests.drills.weights --seed {seed} --first NUMBER --cases 1"
    print(f"served again: p50 {report.served_p50_s} s, max {report.served_max_s} s")
    print(f"settled: max {report.settled_max_s} s; late: {report.late}; load: {os.getloadavg()}")
    wrong = (report.lost, report.duplicated, report.wrong_tokens, report.stale, report.failed)
    assert wrong == (0, 0, 0, 0, 0), "\n".join(report.stories)
    assert report.poisoned == 0, "a request was blamed for what was done to its worker"
    assert report.problems == [], repeat
    assert report.settled_max_s < settings.update_deadline_s, repeat
    assert report.crossed > 0, "no request met an update: the test tested nothing"
    assert report.n_struck > n_kills / 2, "updates were over before anybody died"
