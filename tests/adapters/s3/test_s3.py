"""A worker saves its weights to a real server that speaks S3; what is there is a checkpoint."""

# pyright: reportUnknownVariableType=false
# safetensors' stubs leave parameters untyped.

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rolloutbus
from rolloutbus.errors import EngineFailed
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-s3" / "bin" / "python"
DEADLINE_S = 120.0
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(2 * DEADLINE_S)]


class Storage:
    """A server of objects, and what it is asked for."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("server_program.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **KEYS},
        )
        self.address: str = self._told()["address"]

    def ask(self, **order: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        return self._told()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("told:"):
                return json.loads(line.removeprefix("told:"))
        raise AssertionError("the storage has ended")


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    running = Storage()
    yield running
    running.close()


@pytest.mark.shows("save to S3")
async def test_weights_become_objects_once(storage: Storage, tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", seed=0)
    storage.ask(make="models")
    options = rolloutbus.up(
        model=tmp_path / "model",
        workers=1,
        engine_options={"threads": 1},
        python=PYTHON,
        env={**KEYS, "AWS_ENDPOINT_URL": storage.address},
        save_targets={"cloud": "s3://models/runs", "nowhere": "s3://no-such-bucket"},
    )
    async with options as fleet, rolloutbus.connect(fleet.address) as client:
        saved = await client.save_weights("cloud", "step-1", worker="w0")
        with pytest.raises(EngineFailed, match="'step-1' is there already"):
            await client.save_weights("cloud", "step-1", worker="w0")
        with pytest.raises(EngineFailed, match="NoSuchBucket"):
            await client.save_weights("nowhere", "step-1", worker="w0")

    assert saved.path == "s3://models/runs/step-1"
    keys = storage.ask(list="models")["keys"]
    assert sorted(keys) == sorted(f"runs/step-1/{name}" for name in saved.files)
    assert "runs/step-1/config.json" in keys
    found: dict[str, torch.Tensor] = {}
    for key in keys:
        if key.endswith(".safetensors"):
            into = tmp_path / Path(key).name
            storage.ask(bucket="models", key=key, into=str(into))
            found |= load_file(into)
    model = load_tiny_model(tmp_path / "model")
    for name, tensor in model.named_parameters():
        assert torch.equal(found[name], tensor), name
