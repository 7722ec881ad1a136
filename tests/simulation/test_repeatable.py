"""The same seed is the same run, in any process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.simulation.runs import run_seed

ROOT = Path(__file__).resolve().parents[2]
SEED = 7
PROGRAM = f"from tests.drills.simulation.runs import run_seed; print(run_seed({SEED}).trace)"


@pytest.mark.simulation
def test_a_seed_repeats_its_trace() -> None:
    first, again, other = run_seed(SEED), run_seed(SEED), run_seed(SEED + 1)

    assert first.trace == again.trace
    assert first.trace != other.trace


@pytest.mark.simulation
@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_the_order_of_hashes_changes_nothing(hash_seed: str) -> None:
    elsewhere = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        timeout=280,
    )

    assert elsewhere.stdout.decode().strip() == run_seed(SEED).trace
