"""Arguments of SGLang's server that docs/engine.md names are arguments of this SGLang."""

import re
import subprocess
import sys

from tests.architecture.source_tree import ROOT

PROGRAM = (
    "from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream\n"
    "print(*upstream.server_argument_types(), sep='\\n')"
)
"""SGLang is imported in a process of its own, which finds the stand-ins."""


def test_every_argument_that_the_page_names_is_one_of_this_sglang() -> None:
    page = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`--sglang\.([a-z_0-9]+)", page))
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(named) > 10
    assert named <= set(told.stdout.split())
