"""Ctrl-C before a command has begun: it still imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60.0
SLOW = """
import os, sys
sys.stdout.write("importing\\n")
sys.stdout.flush()
while True:
    os.read(0, 1)
"""


def test_ctrl_c_while_it_imports_ends_it_with_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW)  # the first of what takes seconds to import
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    starting = subprocess.Popen(
        [sys.executable, "-m", "rolloutbus.cli.main", "--help"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert starting.stdout is not None
        assert starting.stdout.readline() == "importing\n"
        starting.send_signal(signal.SIGINT)
        _, complaint = starting.communicate(timeout=WAIT_S)
    finally:
        starting.kill()
    assert (starting.returncode, complaint) == (130, "")
