"""`rolloutbus doctor` on a machine without SGLang, with good models and bad ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolloutbus.launcher.plan import environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def doctor(model: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and the findings by section and name."""
    command = [
        sys.executable,
        "-m",
        "rolloutbus.cli.main",
        "doctor",
        "--json",
        "--model",
        str(model),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=240, check=False)
    found = json.loads(done.stdout)
    return done.returncode, {f"{each['section']} {each['name']}": each for each in found}


def test_it_tells_what_is_there_and_what_a_model_needs(tiny_model: Path) -> None:
    status, found = doctor(tiny_model)
    assert status == 0
    assert found["machine python"]["says"].startswith(sys.version.split()[0])
    assert found["packages pyzmq"]["state"] == "ok"
    assert found["devices torch"]["state"] == "ok"
    assert found["model config.json"]["says"] == "LlamaForCausalLM, llama"
    assert found["model transformers engine"]["state"] == "ok"
    assert "sglang import" in found


def test_a_model_that_no_engine_can_load_fails_and_says_why(
    tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "nobodys"}))
    (broken / "model.safetensors").unlink()

    status, found = doctor(broken)

    assert status == 1
    assert found["model weights"]["state"] == "failed"
    assert found["model transformers engine"]["says"] == "does not know 'nobodys'"


def test_a_directory_without_a_model_fails(tmp_path: Path) -> None:
    status, found = doctor(tmp_path)
    assert status == 1
    assert found["model config.json"]["state"] == "failed"
