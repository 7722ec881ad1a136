"""A step of ART that fails before it begins leaves the fleet serving."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.live_fleet import START_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * START_S)]

ROOT = Path(__file__).parents[2]


def test_a_trainer_that_finds_no_room_leaves_the_engines_awake() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.integration.art_program"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=2 * START_S,
        check=True,
    )
    assert ran.stdout.split("\n")[:2] == ["no room to leave it", "4"]
