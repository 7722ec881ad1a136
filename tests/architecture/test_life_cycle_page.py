"""docs/lifecycles.md shows the tables as they are."""

import subprocess
import sys

from tests.architecture.source_tree import ROOT


def test_the_life_cycle_page_is_what_the_tables_say() -> None:
    check = [sys.executable, "docs/draw_life_cycles.py", "--check"]

    found = subprocess.run(
        check, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stderr
