"""Clients of other projects, unmodified, as programs in an environment of their own."""

# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file

import rolloutbus
from rolloutbus import Fleet
from tests.integration.gateway_process import gateway
from tests.integration.live_fleet import PATIENT
from tests.integration.reciting_model import LINES, save_reciting_model
from tests.integration.trained_model import GREEDY
from tests.integration.trainer_group import rank_0

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
HERE = Path(__file__).parent
DEADLINE_S = 300.0
CUE = "weather"
"""What is said after it is longer than the four tokens that are asked for."""

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "tiny"
    path.mkdir()
    save_reciting_model(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(model: Path) -> AsyncIterator[Fleet]:
    async with rolloutbus.up(model=model, workers=2, http=0, lease=PATIENT) as running:
        yield running


async def told_by(program: str, *arguments: str) -> Any:  # noqa: ANN401 - a program's JSON
    """Run a program of this folder; what it prints."""
    process = await asyncio.create_subprocess_exec(
        PYTHON, HERE / program, *arguments, stdout=PIPE, env={"PATH": "/usr/bin:/bin"}
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return json.loads(told)


async def test_skyrl_remote_client(fleet: Fleet, model: Path) -> None:
    cue = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"][CUE]
    told = await told_by("skyrl_program.py", fleet.http, str(cue))
    assert told["world_size"] == [1, 1]
    generated = told["generated"]
    assert len(generated["response_ids"]) == 4
    assert generated["stop_reasons"] == ["length"] * 4
    assert [len(row) for row in generated["response_logprobs"]] == [4] * 4
    assert [len(each["tokens"]) for each in told["sampled"]["sequences"]] == [3, 3]
    assert told["chat"]["choices"][0]["message"]["content"] == LINES["hello"]
    assert told["rendered"]["token_ids"]
    assert told["tokens_again"] == [[cue]]
    assert told["keep"] == told["wait"] == [["length"], 400]
    [reasons, n_tokens] = told["abort"]
    assert (reasons, n_tokens < 400) in ((["abort"], True), (["length"], False))
    assert "max_tokens" in told["wrong_parameter"]


async def test_smg_rl_client(fleet: Fleet) -> None:
    told = await told_by("smg_program.py", fleet.http)
    assert told["workers"] == [["w0", "ready", "0"], ["w1", "ready", "0"]]
    assert told["called"] == "ready"
    assert told["paused"] == [2, ["not_ready", "not_ready"]]
    assert told["flushed"] == ["w1"]
    assert told["wrong_tag"][0] == "bad_request"
    assert told["unknown"] == [404, "worker_not_found"]


async def test_skyrl_remote_client_updates_weights(fleet: Fleet, model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    async with rank_0() as trainer:
        trainer.order(file, [*tensors], packed=True)
        bucket = trainer.bucket(tensors)
        info = {"names": bucket["names"], "dtype_names": bucket["dtypes"], "packed": True}
        info |= {"shapes": bucket["shapes"]}
        arguments = (str(trainer.port), json.dumps(info))
        *_, finished = await told_by("skyrl_weights_program.py", fleet.http, *arguments)
    [told] = finished["results"]
    assert told["workers"] == ["w0", "w1"]
    assert told["n_tensors"] == len(tensors)
    async with rolloutbus.connect(fleet.address) as client:
        rollout = await client.generate([5, 6], GREEDY, versions=f"exact:{told['version']}")
    assert rollout.version_runs == [(told["version"], GREEDY.max_new_tokens)]


async def test_openai_and_litellm(fleet: Fleet, model: Path) -> None:
    arguments = ["--address", fleet.address, "--tokenizer", str(model), "--tool-format", "hermes"]
    async with gateway(*arguments) as served:
        told = await told_by("openai_program.py", served.url, model.name)
    hello = LINES["hello"]
    ours = told["openai"]
    assert (ours["chat"], ours["streamed"], told["openai_async"]) == (hello, hello, hello)
    assert all(logprob <= 0 and n_likeliest == 2 for logprob, n_likeliest in ours["logprobs"])
    assert ours["called"] == "get_weather"
    assert hello.startswith(ours["text"][0].strip())
    assert len(ours["text"][1]) == 3
    theirs = told["litellm"]
    assert [theirs[name] for name in ("whole", "streamed", "later")] == [hello] * 3
    assert theirs["tokens"] > len(hello.split()), "the end counts"
    assert theirs["called"] == "get_weather"
    assert "top_p" in theirs["refused"]
