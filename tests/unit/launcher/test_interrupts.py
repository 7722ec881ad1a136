"""Ctrl-C before a command has begun: it still imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 240.0
AS_IN_A_TERMINAL = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background has it ignored
runpy.run_module("rolloutbus.cli.main", run_name="__main__")
"""
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
        [sys.executable, "-c", AS_IN_A_TERMINAL, "--help"],
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
