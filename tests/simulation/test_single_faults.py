"""One fault of each kind, right after the messages of a short run."""

import pytest

from tests.drills.simulation.faults import KINDS
from tests.drills.simulation.runs import run_seed
from tests.drills.simulation.scenario import SMALL
from tests.drills.simulation.single_faults import SEED, moments, run_single_faults

STRIDE = 8
"""`make sim ARGS=--single-faults` leaves no message out."""


def test_the_run_is_quiet_without_a_fault() -> None:
    assert run_seed(SEED, SMALL).violations == []


def test_enough_happens_to_be_hit() -> None:
    assert len(moments()) >= 200


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_fault_at_any_moment_loses_nothing(kind: str) -> None:
    assert run_single_faults(STRIDE, [kind]).failing == []
