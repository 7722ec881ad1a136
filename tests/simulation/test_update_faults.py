"""A weight update survives the death of any of its parties in any of its phases."""

import pytest

from rolloutbus.bus.wire.messages.weights import Transport, UpdateMode
from tests.drills.simulation.runs import run_seed
from tests.drills.simulation.scenario import FORGETFUL
from tests.drills.simulation.update_faults import WAYS, run_broken_waves, run_update_faults
from tests.drills.simulation.watch import UpdatePhase


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("transport", "mode"), WAYS)
def test_any_death_in_any_phase_breaks_nothing(transport: Transport, mode: UpdateMode) -> None:
    runs = run_update_faults(transport, mode)
    assert [run for run in runs if run.violations] == []
    assert all(run.has_struck for run in runs)


DEATHS: tuple[tuple[UpdatePhase, UpdatePhase], ...] = (
    ("record", "commit"),
    ("commit", "swap"),
    ("swap", "swap"),
)
"""When the trainer dies, and when the router does."""


@pytest.mark.simulation
@pytest.mark.timeout(900)
def test_waves_are_gone_on_with_although_their_trainer_and_their_router_die() -> None:
    runs = [run_broken_waves(seed, phases) for seed in range(1, 5) for phases in DEATHS]
    assert [run for run in runs if run.violations or not run.are_over] == []
    assert any(run.n_resumed for run in runs)


@pytest.mark.simulation
@pytest.mark.timeout(900)
def test_a_store_that_forgets_to_answer_leaves_its_publisher_in_doubt_and_not_in_error() -> None:
    runs = [run_seed(seed, FORGETFUL) for seed in range(8)]
    assert [run.violations for run in runs if run.violations] == []
    assert all(run.sometimes["hit_recorded"] for run in runs)
    assert any(run.sometimes["publish_version_unknown"] for run in runs)
