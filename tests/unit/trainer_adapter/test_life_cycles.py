"""Life cycles are tables: what is not in them cannot happen."""

import pytest

from rolloutbus.bus.wire.errors import LocalProtocolError, SettingsError
from rolloutbus.bus.wire.messages.control import Status
from rolloutbus.trainer_adapter.client.core.link import LINK_LIFE
from rolloutbus.trainer_adapter.client.core.requests import REQUEST_LIFE, Ask, OpenRequest
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings


@pytest.mark.parametrize("table", [LINK_LIFE, REQUEST_LIFE])
def test_tables_are_closed_and_everything_can_end(table: dict[str, dict[str, str]]) -> None:
    final = {state for state, events in table.items() if not events}
    assert len(final) == 1
    for state, events in table.items():
        assert set(events.values()) <= set(table)
        assert state in final or final & set(events.values())


def test_an_impossible_event_raises_and_changes_nothing() -> None:
    request = OpenRequest("c/1", Ask("status", Status()), 0.0)
    request.advance("ended")
    with pytest.raises(LocalProtocolError):
        request.advance("sent")
    assert request.state == "ended"


@pytest.mark.parametrize(
    ("name", "router"),
    [("no spaces", "ipc:///tmp/r"), ("", "ipc:///tmp/r"), ("c", ""), ("c", "tcp://10.0.0.1:5")],
)
def test_wrong_settings_are_refused_at_once(name: str, router: str) -> None:
    with pytest.raises(SettingsError):
        ClientSettings(name=name, router=router)
