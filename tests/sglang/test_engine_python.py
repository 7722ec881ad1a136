"""Client and engine in two environments: the client's transformers is not what SGLang pins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.sglang.fleets import engine_options, worker_environment

CLIENT = ROOT / ".venv" / "bin" / "python"
PROGRAM = """
import asyncio, importlib.util, json, sys
import rolloutbus, transformers
from rolloutbus import SamplingParams

async def main():
    told = json.loads(sys.argv[1])
    async with rolloutbus.up(workers=1, store=False, **told) as fleet:
        async with rolloutbus.connect(fleet.address, name="me") as client:
            sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
            rollout = await client.generate([5, 6, 7], sampling)
            info = await client.server_info()
            [worker] = info.by_worker.values()
            print("told:" + json.dumps({
                "tokens": rollout.tokens.tolist(),
                "software": dict(worker.software),
                "mine": {
                    "transformers": transformers.__version__,
                    "sglang": importlib.util.find_spec("sglang") and "here",
                },
            }))

asyncio.run(main())
"""
DEADLINE_S = 900.0


@pytest.mark.shows("two environments")
@pytest.mark.skipif(not CLIENT.exists(), reason="there is no second environment here")
@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_client_and_engine_may_have_different_environments(llama: Path, engine: str) -> None:
    options = engine_options() if engine == "sglang" else {"threads": 1, "device": "cpu"}
    told = {
        "model": str(llama),
        "engine": engine,
        "engine_options": options,
        "python": sys.executable,
    }
    done = subprocess.run(
        [str(CLIENT), "-c", PROGRAM, json.dumps(told)],
        env={**os.environ, **worker_environment(), "PYTHONPATH": os.environ["PYTHONPATH"]},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [each for each in done.stdout.splitlines() if each.startswith("told:")]
    answer = json.loads(line.removeprefix("told:"))
    assert len(answer["tokens"]) == 4
    assert answer["software"][engine]
    assert answer["software"][engine] != answer["mine"][engine]
