"""Inputs that grow towards new branches crash no reader; `guided.py` says how they are made."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

FUZZ_S = int(os.environ.get("FUZZ_SECONDS", "2"))
"""`make test` asks for more."""
HANG_S = 300
"""What a busy machine may need besides to start, and to read the good messages once."""
CORPUS_READ = re.compile(r"^#(\d+)\s+INITED cov: (\d+)", re.MULTILINE)
DONE = re.compile(r"^Done (\d+) runs", re.MULTILINE)

pytest.importorskip("atheris", reason="there are no wheels for this system or Python")


@pytest.mark.timeout(FUZZ_S + 2 * HANG_S)
def test_guided_inputs_crash_no_reader(tmp_path: Path, seed: int) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    options = [
        f"-max_total_time={FUZZ_S}",
        f"-seed={seed % 2**31 or 1}",
        f"-timeout={HANG_S}",
        f"-artifact_prefix={tmp_path}/",
    ]
    found = subprocess.run(
        [sys.executable, "tests/fuzz/guided.py", str(corpus), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=FUZZ_S + HANG_S,
    )
    assert found.returncode == 0, found.stderr[-5000:]
    first, last = CORPUS_READ.search(found.stderr), DONE.search(found.stderr)
    assert first is not None
    assert last is not None
    n_good, n_branches = (int(number) for number in first.groups())
    print(f"{n_good} good inputs reach {n_branches} branches; {last[0]}")
    assert int(last[1]) > n_good, "nothing but the good messages was tried"
    assert n_branches > 100, "our code does not show which branches it takes"
