"""A weight update survives the death of any of its parties in any of its phases."""

import pytest

from bus.messages.weights import Transport, UpdateMode
from drills.simulation.update_faults import WAYS, run_update_faults


@pytest.mark.simulation
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("transport", "mode"), WAYS)
def test_any_death_in_any_phase_breaks_nothing(transport: Transport, mode: UpdateMode) -> None:
    runs = run_update_faults(transport, mode)
    assert [run for run in runs if run.violations] == []
    assert all(run.has_struck for run in runs)
