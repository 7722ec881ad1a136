"""A version that is given up while the real SGLang stages it leaves nothing in its schedulers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.fleets import engine_options

TIMEOUT_S = 500
N_KEPT = 8
"""Mappings that a scheduler keeps for the next versions, whatever became of the last ones."""


@pytest.mark.timeout(TIMEOUT_S)
def test_a_version_that_is_given_up_while_it_is_staged_is_not_kept(
    llama: Path, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("an engine has to start: `make nightly`, or --exhaustive")
    settings = {"model": str(llama), **engine_options()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.given_up_versions"],
        input=json.dumps({"settings": settings}) + "\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert any("given up" in each for each in found["told"]), found["told"]
    assert len(found["kept"]) > N_KEPT
    assert max(found["kept"]) <= N_KEPT, found["kept"]
