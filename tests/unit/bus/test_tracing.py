"""Variables turn traces and logs on; their mistakes are told; off, nothing of them is loaded."""

import subprocess
import sys

import pytest

from rolloutbus import RolloutClient
from rolloutbus.errors import SettingsError
from rolloutbus.launcher.plan import environment
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

DEADLINE_S = 240.0


def test_what_is_misspelt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClientSettings(name="c", router="tcp://127.0.0.1:1")
    monkeypatch.setenv("ROLLOUTBUS_TRACES", "jaeger")
    with pytest.raises(SettingsError, match="'jaeger'; it can be off or otlp"):
        RolloutClient(settings)
    monkeypatch.delenv("ROLLOUTBUS_TRACES")
    monkeypatch.setenv("ROLLOUTBUS_TRACE", "otlp")
    with pytest.raises(SettingsError, match="did you mean ROLLOUTBUS_TRACES"):
        RolloutClient(settings)
    monkeypatch.delenv("ROLLOUTBUS_TRACE")
    monkeypatch.setenv("ROLLOUTBUS_LOG", "yaml")
    with pytest.raises(SettingsError, match="'yaml'; it can be text or json"):
        RolloutClient(settings)
    monkeypatch.delenv("ROLLOUTBUS_LOG")
    monkeypatch.setenv("ROLLOUTBUS_LOGS", "json")
    with pytest.raises(SettingsError, match="did you mean ROLLOUTBUS_LOG"):
        RolloutClient(settings)


def test_nothing_of_opentelemetry_is_loaded_where_traces_are_off() -> None:
    script = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "import rolloutbus, rolloutbus.engine_worker.worker.actor\n"
        "import rolloutbus.router.actor, rolloutbus.trainer_adapter.client.client\n"
        "from rolloutbus.bus.actor.tracing import tracer_of\n"
        "from rolloutbus.bus.wire.errors import SettingsError\n"
        "import os\n"
        "assert tracer_of('router', 'router') is None\n"
        "os.environ['ROLLOUTBUS_TRACES'] = 'otlp'\n"
        "try:\n"
        "    tracer_of('router', 'router')\n"
        "except SettingsError as error:\n"
        "    assert 'rolloutbus[otel]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    variables = {k: v for k, v in environment().items() if k != "ROLLOUTBUS_TRACES"}
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
