"""What ends says why, and what to do."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus.bus.actor.process import ActorExit
from rolloutbus.errors import DeadlineExceeded
from tests.integration.live_fleet import DEADLINE_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.usefixtures("runtime_dir"),
]


def test_a_worker_whose_name_is_taken_says_so(runtime_dir: Path) -> None:
    backend = f"ipc://{runtime_dir}/b"
    with ExitStack() as ended:

        def started(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "rolloutbus.cli.main", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ended.callback(process.communicate)
            ended.callback(process.kill)
            assert process.stdout is not None
            assert any("ready" in line for line in process.stdout)  # warnings may come first
            return process

        started("router", "--frontend", f"ipc://{runtime_dir}/f", "--backend", backend)
        worker = ("worker", "--name", "w0", "--engine", "fake", "--router", backend)
        first = started(*worker)
        started(*worker)
        _, said = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == ActorExit.REPLACED
    assert "error: another process has joined as w0" in said


async def test_a_fleet_that_is_late_names_the_option() -> None:
    with pytest.raises(DeadlineExceeded, match=r"raise start_timeout_s \(--start-timeout\)"):
        async with rolloutbus.up(engine="fake", workers=1, start_timeout_s=0.05):
            pass
