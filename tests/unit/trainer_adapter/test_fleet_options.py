"""What trainers say of a fleet is checked where they say it."""

from typing import Any

import pytest

from rolloutbus.errors import SettingsError
from rolloutbus.trainer_adapter.frameworks import fleet
from rolloutbus.trainer_adapter.frameworks.skyrl import link

PLACE = "tcp://127.0.0.1:7777"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"require": "al"}, "require is 'al'; it must be all, quorum, any or at-least:N"),
        ({"deadline_s": "60"}, "deadline_s is '60'; it must be a number"),
        ({"deadline_s": -1}, "deadline_s=-1: say a number of seconds above 0"),
        ({"dtype": "bf16"}, "dtype='bf16': say bfloat16, float16 or float32, or ''"),
        ({"dtype": "nn"}, "dtype='nn': say bfloat16, float16 or float32, or ''"),
        ({"key_file": None}, "key_file is None; it must be a str"),
    ],
)
@pytest.mark.parametrize("kind", [fleet.FleetOptions, link.FleetOptions])
def test_a_value_that_no_option_has_is_refused_at_once(
    kind: type[fleet.FleetOptions], said: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        kind(address=PLACE, **said)
    assert str(refused.value).endswith(why)


def test_skyrls_options_are_checked_too() -> None:
    with pytest.raises(
        SettingsError, match="versions: 'lates' is no version rule; use any, latest"
    ):
        link.FleetOptions(address=PLACE, versions="lates")
    mode: Any = "overwrit"
    with pytest.raises(SettingsError, match="mode is 'overwrit'; it must be staged or overwrite"):
        link.FleetOptions(address=PLACE, mode=mode)


def test_a_misspelt_option_is_answered_with_the_one_that_is_near() -> None:
    misspelt: dict[str, Any] = {"adress": PLACE}
    with pytest.raises(TypeError, match="no parameter 'adress'; did you mean address="):
        fleet.FleetOptions(**misspelt)
