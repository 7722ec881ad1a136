"""AReaL's own rollout engine samples on a fleet, in an environment and a process of its own."""

import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import rolloutbus
from rolloutbus import Fleet, WeightPublisher
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from tests.adapters.programs import Line, lines_of, program
from tests.integration.gateway_process import Gateway, gateway

HERE = Path(__file__).parent
N_STEPS = 5
N_SAMPLES = 8
SEQUENCE_TOKENS = 15
"""Of a prompt and its answer, on the average."""

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("areal") / "tiny"
    build_tiny_model(path, seed=0)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where AReaL writes weights: gateway and workers may read there."""
    return tmp_path


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(model: Path, root: Path) -> AsyncIterator[Fleet]:
    options = {"threads": 1}
    async with rolloutbus.up(
        model=model, workers=2, engine_options=options, weights_dir=root
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def served(fleet: Fleet, model: Path, root: Path) -> AsyncIterator[Gateway]:
    arguments = ["--address", fleet.address, "--tokenizer", str(model)]
    async with gateway(*arguments, "--weights-root", str(root)) as running:
        yield running


async def told_by(name: str, *arguments: str, **more: str) -> AsyncGenerator[Line]:
    """Run a program of this folder, with more of an environment; each line that it prints."""
    async with program("areal", HERE / name, *arguments, **more) as process:
        async for line in lines_of(process):
            yield line


async def test_areals_trainer_trains_on_tokens_of_the_fleet(root: Path) -> None:
    """Its own processes, and a fleet that a run before it has left paused."""
    model = root / "qwen"
    save_qwen_model(model)
    words = ["--config", str(HERE / "trainer.yaml"), f"tokenizer_path={model}"]
    steps: list[Line] = []
    options = {"threads": 1}
    async with (
        rolloutbus.up(model=model, workers=2, engine_options=options, weights_dir=root) as fleet,
        rolloutbus.connect(fleet.address) as client,
        gateway("--address", fleet.address, "--weights-root", str(root)) as served,
        aclosing(
            told_by(
                "trainer_program.py",
                *words,
                f"cluster.fileroot={root}",
                AREAL_LLM_SERVER_ADDRS=_address(served),
            )
        ) as lines,
    ):
        await client.pause("abort")
        async for line in lines:
            steps.append(line)
            if line["step"] == 1:
                fleet.kill("w0")
        committed = (await client.status()).committed["default"]

    assert [line["step"] for line in steps] == [1, 2, 3]
    assert committed >= 3
    for line in steps:
        assert line["ppo_actor/n_seqs"] == 16
        assert line["ppo_actor/seq_len/avg"] == SEQUENCE_TOKENS
        if line["ppo_actor/update/version_stats/sample_staleness_theta_max"] == 0:
            for end in ("min", "max"):
                gap = line[f"ppo_actor/update/compute_logp/kl_div_direct/{end}"]
                assert abs(gap) < 1e-4, "tokens are as likely as the trainer computes"


async def test_each_token_has_the_version_that_its_worker_attests(
    fleet: Fleet, served: Gateway, model: Path, root: Path
) -> None:
    async with rolloutbus.connect(fleet.address) as client:
        # So that AReaL's numbers are others than the fleet's.
        first = await WeightPublisher(client).publish(load_tiny_model(model))
    arguments = [_address(served), str(model), str(root), "--steps", str(N_STEPS)]
    steps: list[Line] = []
    async with aclosing(told_by("rollout_program.py", *arguments)) as lines:
        async for line in lines:
            if line.get("running") == 2:
                fleet.kill("w0")
            elif "step" in line:
                steps.append(line)

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    for line in steps:
        assert len(line["versions"]) == N_SAMPLES, "nothing is lost or doubled"
        step = line["step"]
        # Each sample was begun with the weights of the step before.
        assert {tuple(each) for each in line["versions"]} <= {
            (step - 1, step),
            (step - 1,),
            (step,),
        }
        assert line["ratio_error"] < 1e-4
    assert any(len(each) > 1 for line in steps for each in line["versions"]), "updates in flight"
    async with rolloutbus.connect(fleet.address) as client:
        committed = (await client.status()).committed["default"]
    # Each step is one version for the fleet; a try that failed with a killed worker had a number.
    assert committed >= first.version + N_STEPS


async def test_an_adapters_version_is_that_which_sampled(
    fleet: Fleet, served: Gateway, model: Path, root: Path
) -> None:
    del fleet
    arguments = [_address(served), str(model), str(root), "--steps", "3", "--lora"]
    async with aclosing(told_by("rollout_program.py", *arguments)) as lines:
        steps = [line async for line in lines]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert all(len(each) == 1 for each in line["versions"]), "an adapter samples all of it"
        assert all(each[0] < line["step"] for each in line["versions"])
        assert line["ratio_error"] < 1e-3


async def test_what_a_fleet_cannot_is_refused_and_healthy_gateways_are_chosen(
    fleet: Fleet, served: Gateway
) -> None:
    del fleet
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        absent = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with aclosing(told_by("surface_program.py", _address(served), absent)) as lines:
            [told] = [line async for line in lines]
    assert told["lacks"] == []
    assert set(told["routed"]) == {_address(served)}
    assert "name one" in told["two"]
    assert "rolloutbus up" in told["none"]
    assert "rolloutbus up" in told["launch"]
    assert f"no worker takes requests at http://{absent}" in told["absent"]
    assert "v1" in told["second"]
    assert "weight_update_mode=disk" in told["group"]
    assert "weight_update_mode=disk" in told["chunk"]
    assert "RemoteProtocolError" in told["stranger"]


def save_qwen_model(path: Path) -> None:
    """Write a tiny model of a kind that AReaL trains, with a tokenizer as it wants one."""
    build_tiny_model(path, seed=0)
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(path)
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    cast("Any", Qwen2ForCausalLM(config)).save_pretrained(path)


def _address(served: Gateway) -> str:
    return served.url.removeprefix("http://")
