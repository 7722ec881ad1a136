"""A step in a table goes where the table says, or nowhere."""

from typing import Literal

import pytest

from rolloutbus.bus.actor.effects import next_state
from rolloutbus.bus.wire.errors import LocalProtocolError

Light = Literal["red", "green"]
LIGHTS: dict[Light, dict[str, Light]] = {"red": {"go": "green"}, "green": {"stop": "red"}}


def test_an_event_leads_to_the_state_that_the_table_names() -> None:
    assert next_state(LIGHTS, "red", "go", "light 1") == "green"


def test_an_event_without_meaning_names_subject_event_and_state() -> None:
    with pytest.raises(LocalProtocolError, match=r"light 1: 'stop' cannot happen while 'red'"):
        next_state(LIGHTS, "red", "stop", "light 1")
