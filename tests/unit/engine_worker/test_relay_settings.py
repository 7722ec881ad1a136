"""Where a worker serves weights to others if nobody says so."""

import pytest

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.engine_worker.settings import WorkerSettings

KEYS = SecuritySettings(key_file="w.key", allow_list="allow.json", server_keys=["ab" * 32])
ROUTER = "tcp://127.0.0.1:7778"


@pytest.mark.parametrize(
    ("stream", "relay", "endpoint"),
    [
        ("tcp://127.0.0.1:0", "", ""),
        ("tcp://192.0.2.7:5000", "", "tcp://192.0.2.7:0"),
        ("tcp://[2001:db8::7]:5000", "", "tcp://[2001:db8::7]:0"),
        ("tcp://192.0.2.7:5000", "tcp://192.0.2.8:9", "tcp://192.0.2.8:9"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
    ],
)
def test_a_worker_beyond_this_machine_serves_beside_its_stream(
    stream: str, relay: str, endpoint: str
) -> None:
    settings = WorkerSettings("w", ROUTER, stream=stream, relay=relay, security=KEYS)
    assert settings.relay_endpoint == endpoint


def test_nothing_is_served_beyond_this_machine_without_keys() -> None:
    unsafe = SecuritySettings(unsafe_no_auth=True)
    settings = WorkerSettings("w", ROUTER, stream="tcp://192.0.2.7:0", security=unsafe)
    assert not settings.relay_endpoint
    with pytest.raises(SettingsError):
        WorkerSettings("w", ROUTER, relay="tcp://192.0.2.7:0", security=unsafe)
