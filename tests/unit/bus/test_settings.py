"""Timing that would break the promises of leases is refused at the start."""

import pytest

from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.errors import SettingsError


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"heartbeat_s": 0.7}, "lease_s"),
        ({"holder_s": 2.9}, "holder_s"),
        ({"recovery_s": 3.2}, "recovery_s"),
        ({"silence_s": 0.3}, "silence_s"),
        ({"silence_s": 2.5}, "silence_s"),
    ],
)
def test_inconsistent_timing_is_refused(changes: dict[str, float], name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        LeaseSettings(**changes)


def test_shorter_times_in_proportion_are_fine() -> None:
    LeaseSettings(heartbeat_s=0.1, lease_s=0.6, holder_s=0.48, silence_s=0.3, recovery_s=0.7)
