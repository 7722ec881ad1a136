"""ART's own client trains on backends of the bus, in an environment and a process of its own."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from rolloutbus.examples.tiny_model import build_tiny_model

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-art" / "bin" / "python"
PROGRAM = Path(__file__).with_name("train_program.py")
DEADLINE_S = 900.0
"""Of everything; a fleet is brought up ten times."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}={% endif %}{% endfor %}"
)
STEPS = {
    "split-lora": 3,
    "shared-lora": 2,
    "split-disk": 3,
    "shared-disk": 2,
    "split-restart": 1,
}
"""That each backend trains, and one more that changes nothing."""
EXACT = 1e-4
N_LONG = 48
"""Tokens of the long prompt that fill blocks of the cache, but for the last block."""

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(DEADLINE_S)]

Line = dict[str, Any]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Line]:
    """What the program tells of each backend."""
    directory = tmp_path_factory.mktemp("art")
    model = directory / "tiny"
    build_tiny_model(model, seed=0)
    tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token  # ART fills its rows with it
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    names = ["settings", *STEPS, "split-disk again", "pipeline"]
    done = subprocess.run(
        # The engines live in another environment: the one that runs this.
        [PYTHON, PROGRAM, model, directory / "learned", sys.prefix, *names],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TQDM_DISABLE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the net for one
        },
    )
    told = [
        json.loads(line.removeprefix("told:"))
        for line in done.stdout.decode().splitlines()
        if line.startswith("told:")
    ]
    return {line["backend"]: line for line in told}


@pytest.mark.shows("SGLangBackend", "two environments")
@pytest.mark.parametrize(("backend", "n_steps"), STEPS.items())
def test_each_step_is_sampled_from_the_one_before(
    lines: dict[str, Line], backend: str, n_steps: int
) -> None:
    line = lines[backend]
    assert line["steps"] == [*range(1, n_steps + 1)]
    assert line["names"] == [f"agent@{step}" for step in range(n_steps)]
    assert line["name"] == f"agent@{n_steps + 1}"


@pytest.mark.shows("shared mode", "weight_sync_method")
@pytest.mark.parametrize("backend", STEPS)
def test_what_a_step_samples_is_what_the_trainer_computes(
    lines: dict[str, Line], backend: str
) -> None:
    assert lines[backend]["gap"] < EXACT


@pytest.mark.parametrize(("backend", "n_steps"), STEPS.items())
def test_a_step_is_never_served_by_the_weights_of_another(
    lines: dict[str, Line], backend: str, n_steps: int
) -> None:
    """While steps come and go; judged by the checkpoints that ART has on its disk."""
    answers, refusals = lines[backend]["answers"], lines[backend]["refusals"]
    assert {each["step"] for each in answers} >= {n_steps - 1, n_steps}
    for each in answers:
        assert each["gap"] < EXACT < each["other"]
    # Too early or too late: no such model, no such version, or engines that start anew.
    assert {each["status"] for each in refusals} <= {404, 503, 0}
    if backend.startswith("split"):
        assert refusals, "the next step was asked for before it was there"


@pytest.mark.parametrize("backend", ["split-lora", "split-disk"])
def test_rewards_rise(lines: dict[str, Line], backend: str) -> None:
    first, *others = lines[backend]["rewards"]
    assert max(others) > first


def test_a_penalty_is_measured_against_the_step_that_it_names(lines: dict[str, Line]) -> None:
    before, *after = lines["split-lora"]["kls"]
    assert before < max(after), "the first step begins at its reference"


@pytest.mark.shows("split mode")
def test_the_cache_survives_a_new_adapter(lines: dict[str, Line]) -> None:
    line = lines["split-lora"]
    assert line["cached"] == line["cached_after"] == {"base": N_LONG, "newest": N_LONG}


@pytest.mark.shows("weight_sync_method: restart")
@pytest.mark.parametrize("backend", ["split-disk", "split-restart"])
def test_the_cache_of_other_weights_is_never_used(lines: dict[str, Line], backend: str) -> None:
    assert lines[backend]["cached"] == {"base": N_LONG}
    assert lines[backend]["cached_after"] == {"base": 0}


def test_a_new_process_goes_on_where_training_ended(lines: dict[str, Line]) -> None:
    line = lines["split-disk again"]
    assert line["names"] == [f"agent@{STEPS['split-disk'] + 1}"]
    assert line["steps"] == [STEPS["split-disk"] + 2]
    assert line["gap"] < EXACT


def test_rollouts_of_a_pipeline_end_on_the_step_that_they_began_with(
    lines: dict[str, Line],
) -> None:
    line = lines["pipeline"]
    assert line["last"] == line["first"] + 3
    assert len({asked for asked, _ in line["turns"]}) > 1
    for asked, loras in line["turns"]:
        assert {lora.partition("@")[0] for lora in loras} == {asked.replace("@", "-")}


@pytest.mark.shows(
    "inference_device",
    "training_devices",
    "DeviceConfig",
    "auto_detect",
    "server_timeout",
    "ART_SERVER_TIMEOUT",
)
def test_devices_are_chosen_by_what_is_there(lines: dict[str, Line]) -> None:
    apart, shared = [0, [1], False], [0, [0], True]
    assert lines["settings"]["devices"] == [apart, shared, apart, apart]
    assert lines["settings"]["timeout"] == 180


def test_words_for_sglang_are_its_arguments(lines: dict[str, Line]) -> None:
    """One at a time, each changes what it means and nothing else."""
    adapters = ["enable_lora", "max_lora_rank", "lora_target_modules"]
    steps = ["max_loras_per_batch", "max_loaded_loras"]
    assert lines["settings"]["engine"] == {
        "mem_fraction_static": 0.9,
        "disable_radix_cache": False,
        "tp_size": 1,
        "base_gpu_id": 0,
        **dict(zip(adapters, [True, 8, ["q_proj"]], strict=True)),
        **dict(zip(steps, [4, 5], strict=True)),
        "max_context": 0,
        "text": True,
    }
    assert lines["settings"]["changed"] == {
        "memory": {"mem_fraction_static": 0.5},
        "cache": {"disable_radix_cache": True},
        "steps": {"max_loras_per_batch": 6, "max_loaded_loras": 7},
        "context": {"max_context": 4096},
        "tensor parallel": {"tp_size": 2},
        "disk": dict.fromkeys([*adapters, *steps]),
        "shared": {"enable_memory_saver": True, "enable_weights_cpu_backup": True},
    }


@pytest.mark.shows("sglang_config", "flush_cache_on_sync")
def test_what_means_nothing_here_is_refused_by_its_name(lines: dict[str, Line]) -> None:
    refused = lines["settings"]["refused"]
    parts = {
        "no such method": "weight_sync_method: 'ftp' is not one of lora, disk, restart",
        "flush": "flush_cache_on_sync",
        "tensor parallel": "tensor_parallel_size: the transformers engine has no such thing",
        "two trainers": "training_devices: [1, 2]: this trainer uses one device",
        "twice": "inference_device and device_config: say one of them",
        "fake": "engine: the fake one",
        "name": "name: 'my agent' cannot be a model's here",
        "vllm": "_internal_config: engine_args means nothing",
        "unsloth": "_internal_config: init_args.load_in_4bit means nothing",
        "merged": "rollout_weights_mode 'merged'",
        "timeout": "ART_SERVER_TIMEOUT",
        "supervised": "train_sft: ART prepares its texts by Unsloth",
    }
    assert refused.keys() == parts.keys()
    for name, part in parts.items():
        assert part in refused[name]
