"""verl's own servers, balancer, checkpoint engine and trainer on a fleet, in their processes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers' stubs leave parameters untyped.

import asyncio
import json
import os
import re
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

import rolloutbus
from rolloutbus import Fleet
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
HERE = Path(__file__).parent
PACKAGE = "rolloutbus.trainer_adapter.frameworks.verl"
DEADLINE_S = 240.0
"""Of every part; each of Ray's processes imports verl for 10 s, and longer on a busy machine."""
PROMPT = [1, 5, 6, 7]
LONG = 100
STEP, NEXT_STEP = 7, 8
N_RANKS = 2
"""Of verl's trainer, each of which holds half of the model."""
N_STEPS, BATCH, N_EACH, N_TOKENS = 3, 4, 4, 12
TEXTS = ["12", "123", "1", "21"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
ROLLOUT, FSDP = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.fsdp_config"
MOST_STALE = {"sync": 0, "separate_async": 2}
APART = (
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=rolloutbus",
    f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.rolloutbus=${{{ROLLOUT}.engine_kwargs.rolloutbus}}",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "trainer.v1.separate_async.parameter_sync_step=1",
)
"""What replicas that stand apart from the trainer want besides."""
TINY = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={N_EACH}",
    "data.max_prompt_length=16",
    f"data.max_response_length={N_TOKENS}",
    "data.dataloader_num_workers=0",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.strategy=fsdp2",
    f"{FSDP}.use_torch_compile=False",
    f"+{FSDP}.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "+actor_rollout_ref.model.override_config={attn_implementation: eager}",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=12",
    f"+ray_kwargs.ray_init.num_gpus={N_RANKS}",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "trainer.device=cpu",
    "trainer.nnodes=1",
    f"trainer.n_gpus_per_node={N_RANKS}",
    f"trainer.total_training_steps={N_STEPS}",
    "trainer.logger=[file]",
    "trainer.val_before_train=False",
    "trainer.resume_mode=disable",
)
"""A small run on a CPU; Ray takes each rank's for a GPU."""

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

Output = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The fleet's, and what the trainer has instead."""
    found = {name: tmp_path_factory.mktemp("verl") / name for name in ("fleet", "trainer")}
    for seed, path in enumerate(found.values()):
        build_tiny_model(path, seed=seed)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.eos_token = tokenizer.pad_token
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(path)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(models: dict[str, Path]) -> AsyncIterator[Fleet]:
    options = {"threads": 1}
    async with rolloutbus.up(model=models["fleet"], workers=2, engine_options=options) as running:
        yield running


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verl") / "router.yaml"
    path.write_text(f"router_class: {PACKAGE}.FleetLoadBalancer\n")
    return path


Run = Callable[..., AbstractAsyncContextManager[Process]]


@pytest.fixture(scope="module")
def run() -> Run:
    """Starts a program in verl's environment: (its arguments)."""

    @asynccontextmanager
    async def running(*arguments: object, **more: str) -> AsyncGenerator[Process]:
        # Names of sockets are short, so Ray's are not below pytest's directories.
        with TemporaryDirectory(prefix="ray-") as ray:
            process = await asyncio.create_subprocess_exec(
                *(PYTHON, *map(str, arguments)),
                cwd=ROOT,
                stdout=PIPE,
                limit=2**24,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": f"{ROOT}:{HERE}",
                    "VERL_USE_EXTERNAL_MODULES": f"cpu_platform,{PACKAGE}",
                    "VERL_ENGINE_DEVICE": "cuda",
                    "RAY_TMPDIR": ray,
                    "RAY_USAGE_STATS_ENABLED": "0",
                    **more,
                },
            )
            try:
                yield process
            finally:
                if process.returncode is None:
                    process.terminate()  # Ray ends its processes
                    await process.wait()

    return running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(fleet: Fleet, models: dict[str, Path], router: Path, run: Run) -> dict[str, Any]:
    """What the program of this folder tells, part by part."""
    told: dict[str, Any] = {}
    arguments = (HERE / "serving_program.py", fleet.address, models["trainer"], router)
    async with run(*arguments) as process:
        assert process.stdout is not None
        while True:
            async with asyncio.timeout(DEADLINE_S):
                line = await process.stdout.readline()
            if not line:
                break
            if line.startswith(b'{"part"'):
                part = json.loads(line)
                told[part["part"]] = part["value"]
                if part["part"] == "running":
                    fleet.kill("w0")
        assert await process.wait() == 0
    return told


async def test_the_turns_of_a_trajectory_stay_at_one_worker(parts: dict[str, Any]) -> None:
    assert [len(set(workers)) for workers in parts["turns"]] == [1] * 8


async def test_first_turns_are_spread_over_the_workers(parts: dict[str, Any]) -> None:
    workers: list[str] = parts["first turns"]
    assert set(workers) == {"w0", "w1"}
    assert max(map(workers.count, workers)) <= 13, "16 at once: no worker gets nearly all of them"


async def test_servers_have_as_many_turns_each(parts: dict[str, Any]) -> None:
    assert set(parts["in flight"].values()) == {16}
    assert set(parts["idle"].values()) == {0}


async def test_an_output_has_what_verl_asks_of_it(parts: dict[str, Any]) -> None:
    output = parts["output"]
    assert len(output["token_ids"]) == len(output["log_probs"]) == 6
    assert output["stop_reason"] == "completed"
    assert output["num_preempted"] == 0
    assert output["routed_experts"] is None
    fields = output["extra_fields"]
    assert fields["version_runs"] == [[0, 6]]
    assert fields["worker"] in ("w0", "w1")
    assert fields["global_steps"] is None, "verl has not said which step these weights are"


async def test_new_weights_answer_the_next_turn(
    parts: dict[str, Any], models: dict[str, Path]
) -> None:
    before, after = (greedy_of(models[name]) for name in ("fleet", "trainer"))
    assert before[0] != after[0]
    assert_said(parts["greedy"], *before)
    for output in parts["greedy after"]:
        assert_said(output, *after)
        fields = output["extra_fields"]
        assert fields["version_runs"] == [[1, 8]]
        assert fields["global_steps"] == fields["min_global_steps"] == STEP
        assert fields["max_global_steps"] == STEP
    assert parts["metrics"]["fleet/version"] == 1


async def test_an_update_that_fails_changes_nothing(
    parts: dict[str, Any], models: dict[str, Path]
) -> None:
    assert "model.embed_tokens.weight" in parts["failed update"], "it names what is wrong"
    output = parts["greedy after failure"]
    assert_said(output, *greedy_of(models["trainer"]))
    assert output["extra_fields"]["global_steps"] == STEP


async def test_aborted_turns_keep_their_tokens(parts: dict[str, Any]) -> None:
    outputs: list[Output] = parts["aborted"]
    assert {each["stop_reason"] for each in outputs} <= {"aborted", "completed"}
    cut = [each for each in outputs if each["stop_reason"] == "aborted"]
    assert cut, "they were long enough to be met"
    assert any(0 < len(each["token_ids"]) < LONG for each in cut)
    assert all(len(each["token_ids"]) == len(each["log_probs"]) for each in cut)
    rejected = parts["rejected"]
    assert (rejected["stop_reason"], rejected["token_ids"]) == ("aborted", [])


async def test_turns_go_on_across_an_update(parts: dict[str, Any]) -> None:
    outputs: list[Output] = parts["across an update"]
    assert {len(each["token_ids"]) for each in outputs} == {LONG}
    spans = {
        (each["extra_fields"]["min_global_steps"], each["extra_fields"]["max_global_steps"])
        for each in outputs
    }
    assert (STEP, NEXT_STEP) in spans
    assert spans <= {(STEP, STEP), (STEP, NEXT_STEP), (NEXT_STEP, NEXT_STEP)}


async def test_turns_survive_the_death_of_their_worker(parts: dict[str, Any]) -> None:
    outputs: list[Output] = parts["killed"]
    for output in outputs:
        assert len(output["token_ids"]) == len(output["log_probs"]) == LONG
        assert output["stop_reason"] == "completed"
        assert sum(n for _, n in output["extra_fields"]["version_runs"]) == LONG
    moved = [each for each in outputs if each["num_preempted"]]
    assert moved, "the worker had some of them"


async def test_words_that_mean_nothing_are_refused_by_name(parts: dict[str, Any]) -> None:
    refused = parts["refused"]
    for word in ("gpu_memory_utilization", "tensor_model_parallel_size", "free_cache_engine"):
        assert f"rollout.{word}" in refused[word]
    assert "adress" in refused["engine_kwargs.rolloutbus.adress"]
    assert len(refused) == 9, "none is swallowed"
    assert "prompt_logprobs" in parts["strange word"]
    assert "router_config_path" in parts["no session"]


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
async def test_verls_trainer_trains_on_tokens_of_the_fleet(
    fleet: Fleet, models: dict[str, Path], router: Path, run: Run, tmp_path: Path, mode: str
) -> None:
    row = {"data_source": "toy", "reward_model": {"style": "rule", "ground_truth": ""}}
    rows = [
        {**row, "prompt": [{"role": "user", "content": text}], "extra_info": {"index": index}}
        for index, text in enumerate(TEXTS * 8)
    ]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, rows)))
    metrics = tmp_path / "metrics.jsonl"
    words = [
        "actor_rollout_ref.rollout.name=rolloutbus",
        f"+{ROLLOUT}.engine_kwargs.rolloutbus={{address: '{fleet.address}', dtype: float32}}",
        f"actor_rollout_ref.rollout.router_config_path={router}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        *(APART if mode == "separate_async" else ()),
        f"trainer.v1.trainer_mode={mode}",
        f"trainer.default_local_dir={tmp_path}",
        f"hydra.run.dir={tmp_path}",
        f"data.train_files={tmp_path / 'data.json'}",
        f"data.val_files={tmp_path / 'data.json'}",
        f"actor_rollout_ref.model.path={models['trainer']}",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        *TINY,
    ]
    async with rolloutbus.connect(fleet.address) as client:
        before = (await client.status()).committed.get("default", 0)
        # verl 0.9.1 cannot write one of its messages of level INFO.
        log = {"VERL_FILE_LOGGER_PATH": str(metrics), "VERL_LOGGING_LEVEL": "WARN"}
        async with run("-m", "verl.trainer.main_ppo", *words, **log) as process:
            async with asyncio.timeout(DEADLINE_S * 2):
                said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()[-4000:]
        committed = (await client.status()).committed["default"]

    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [each["step"] for each in steps] == [*range(1, N_STEPS + 1)]
    assert committed == before + 1 + N_STEPS, "one to begin with, and one for each step"
    for step in (each["data"] for each in steps):
        assert step["response_length/mean"] == N_TOKENS
        assert 0 <= step["training/off_policy/trajectory_staleness_worst/max"] <= MOST_STALE[mode]
        if mode == "sync":
            told = step["training/rollout_probs_diff_max"]
            assert told < 1e-4, "tokens are as likely as the trainer computes"


async def test_the_page_explains_every_word_of_a_rollout(parts: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "adapters" / "verl.md").read_text()
    explained = set(re.findall(r"`([a-z_0-9]+)[`.=]", page))
    assert set(parts["words"]) - explained == {"_target_"}, "all but Hydra's own"


def greedy_of(path: Path) -> tuple[list[int], list[float]]:
    """The 8 likeliest tokens after the prompt, one after another, and their logprobs."""
    model, tokens, logprobs = load_tiny_model(path), list(PROMPT), list[float]()
    with torch.inference_mode():
        for _ in range(8):
            scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return tokens[len(PROMPT) :], logprobs


def assert_said(output: Output, tokens: list[int], logprobs: list[float]) -> None:
    assert output["token_ids"] == tokens
    # A temperature of 0 leaves one token to sample from.
    assert output["log_probs"] == pytest.approx([0.0] * 8) or output["log_probs"] == pytest.approx(
        logprobs, abs=1e-4
    )
