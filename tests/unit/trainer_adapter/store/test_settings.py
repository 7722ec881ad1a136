import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.store.settings import StoreSettings


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_times_after_which_a_version_is_given_up_must_lie_ahead(seconds: float) -> None:
    with pytest.raises(SettingsError, match=r"reservation_s .* more than 0 seconds"):
        StoreSettings("ipc:///router", "store", reservation_s=seconds)
    with pytest.raises(SettingsError, match=r"pull_grace_s .* more than 0 seconds"):
        StoreSettings("ipc:///router", "store", pull_grace_s=seconds)
