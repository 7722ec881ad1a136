"""Adapters on the transformers engine: each row gets its own, and what does not fit is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rolloutbus.engine_worker.engine import Work
from rolloutbus.engine_worker.engines.transformers.engine import TransformersEngine
from tests.lora_adapters import Lora, random_lora
from tests.step_log import StepLog
from tests.tiny_models import Build, check_fresh, make_model, work

MODEL = make_model("llama", 0)
A, A2, B = random_lora(MODEL, 1), random_lora(MODEL, 2, rank=3), random_lora(MODEL, 3)
SHARED_PROMPT = 40


def with_lora(lora: str, name: str, **options: int) -> Work:
    return dataclasses.replace(work(name, **options), lora=lora)


def same_prompt(works: list[Work]) -> list[Work]:
    return [dataclasses.replace(each, prompt=works[0].prompt) for each in works]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "sliding", "mixed"])
def test_rows_with_different_adapters_run_in_one_batch(
    build: Build, log: StepLog, kind: str
) -> None:
    model = make_model(kind, 0)
    adapters = {"a": random_lora(model, 1), "b": random_lora(model, 3, targets=["v_proj"])}
    engine = build(kind)
    for name, lora in adapters.items():
        engine.lora.load(name, 1, lora.in_memory())
    works = [with_lora(lora, f"{lora}{i}") for i in range(2) for lora in ("a", "", "b")]

    engine.generate(works)
    log.wait_finished(*(each.key[0] for each in works))

    for each in works:
        truth = adapters[each.lora].merged(model) if each.lora else model
        check_fresh(log, each, truth)


def test_an_adapter_that_overflows_ends_its_own_requests(build: Build, log: StepLog) -> None:
    huge = dataclasses.replace(A, tensors={name: each * 1e30 for name, each in A.tensors.items()})
    engine = build()
    engine.lora.load("a", 1, huge.in_memory())
    works = [with_lora(lora, f"{lora}{i}") for i in range(2) for lora in ("a", "")]

    engine.generate(works)
    log.wait_finished("0", "1")

    told = {step.keys[row][0]: each for step in log.steps for row, each in step.problems}
    assert told.keys() == {"a0", "a1"}
    assert {(each.code, each.field) for each in told.values()} == {("broken_weights", "lora")}
    for each in works[1::2]:
        check_fresh(log, each, MODEL)


@pytest.mark.shows("load_lora_adapter")
def test_an_adapter_comes_from_files_too(build: Build, log: StepLog, tmp_path: Path) -> None:
    engine = build()
    engine.lora.load("a", 7, A.save(tmp_path / "a"))

    engine.generate([request := with_lora("a@7", "r")])
    log.wait_finished("r")

    check_fresh(log, request, A.merged(MODEL))
    assert engine.lora.versions() == {"a": 7}


def test_each_request_is_told_the_version_that_it_was_given(build: Build, log: StepLog) -> None:
    engine = build()
    works = [with_lora(lora, name) for lora, name in (("a", "old"), ("a", "new"), ("", "none"))]
    engine.lora.load("a", 1, A.in_memory())
    engine.generate(works[:1])
    engine.lora.load("a", 2, A2.in_memory())
    engine.generate(works[1:])
    log.wait_finished("old", "new", "none")

    told = [(step.keys[row][0], lora) for step in log.steps for row, lora in step.adapters]
    assert told == [("old", "a@1"), ("new", "a@2")]


def test_adapters_share_no_kv_of_equal_prompts(build: Build, log: StepLog) -> None:
    engine = build()
    engine.lora.load("a", 1, A.in_memory())
    engine.lora.load("b", 1, B.in_memory())
    loras = ["", "a", "b", ""]
    works = same_prompt(
        [with_lora(each, f"r{i}", n_prompt=SHARED_PROMPT) for i, each in enumerate(loras)]
    )
    for each in works:  # one after another: each finds what the one before has left
        engine.generate([each])
        log.wait_finished(each.key[0])

    for each in works:
        truth = {"": MODEL, "a": A.merged(MODEL), "b": B.merged(MODEL)}[each.lora]
        check_fresh(log, each, truth)


def test_a_new_version_of_an_adapter_concerns_no_running_request(
    build: Build, log: StepLog
) -> None:
    engine = build()
    engine.lora.load("a", 1, A.in_memory())
    engine.lora.load("b", 1, B.in_memory())
    old, other = with_lora("a", "old", n=30), with_lora("b", "other", n=30)
    log.hold(3)
    engine.generate([old, other])
    loading = log.call_midway(engine, lambda: engine.lora.load("a", 2, A2.in_memory()))
    loading.result()
    engine.generate([new := with_lora("a", "new")])
    log.wait_finished("old", "other", "new")

    check_fresh(log, old, A.merged(MODEL))
    check_fresh(log, other, B.merged(MODEL))
    check_fresh(log, new, A2.merged(MODEL))
    assert engine.lora.versions() == {"a": 2, "b": 1}


@pytest.mark.shows("unload_lora_adapter")
def test_an_adapter_in_use_is_forgotten_for_new_requests_only(build: Build, log: StepLog) -> None:
    engine = build()
    engine.lora.load("a", 1, A.in_memory())
    log.hold(3)
    engine.generate([running := with_lora("a", "running", n=30)])
    log.wait_held()
    engine.lora.unload("a")
    log.release()
    engine.generate([with_lora("a", "late")])
    log.wait_finished("running")
    log.wait_until(lambda: any(step.problems for step in log.steps))

    check_fresh(log, running, A.merged(MODEL))
    (problem,) = [problem for step in log.steps for _, problem in step.problems]
    assert (problem.code, problem.field) == ("bad_request", "lora")
    with pytest.raises(ValueError, match="a is not loaded"):
        engine.lora.unload("a")


@pytest.mark.parametrize("lora", ["a", "b@2", "b@0"])
def test_what_is_not_loaded_is_refused(build: Build, log: StepLog, lora: str) -> None:
    engine = build()
    engine.lora.load("b", 1, B.in_memory())

    engine.generate([with_lora(lora, "r")])

    log.wait_until(lambda: bool(log.steps))
    ((_, problem),) = log.steps[0].problems
    assert (problem.code, problem.field) == ("bad_request", "lora")


def test_to_load_what_is_loaded_does_nothing(build: Build, log: StepLog) -> None:
    engine = build()
    engine.lora.load("a", 1, A.in_memory())
    engine.lora.load("a", 1, B.in_memory())

    engine.generate([request := with_lora("a", "r")])
    log.wait_finished("r")

    check_fresh(log, request, A.merged(MODEL))


def retracted(engine: TransformersEngine) -> None:
    engine.pause("retract")
    engine.resume()


def test_a_retracted_request_keeps_its_adapter(build: Build, log: StepLog) -> None:
    engine = build()
    engine.lora.load("a", 1, A.in_memory())
    log.hold(5)
    engine.generate([request := with_lora("a", "r", n=30)])
    log.call_midway(engine, lambda: retracted(engine)).result()
    log.wait_finished("r")

    check_fresh(log, request, A.merged(MODEL))


def changed_config(**fields: object) -> Callable[[Lora], tuple[dict[str, object], Lora]]:
    return lambda lora: ({**lora.config, **fields}, lora)


def without(part: str) -> Callable[[Lora], tuple[dict[str, object], Lora]]:
    def drop(lora: Lora) -> tuple[dict[str, object], Lora]:
        name = next(name for name in lora.tensors if part in name)
        left = {each: value for each, value in lora.tensors.items() if each != name}
        return lora.config, dataclasses.replace(lora, tensors=left)

    return drop


def with_tensor(name: str, value: torch.Tensor) -> Callable[[Lora], tuple[dict[str, object], Lora]]:
    return lambda lora: (
        lora.config,
        dataclasses.replace(lora, tensors={**lora.tensors, f"base_model.model.{name}": value}),
    )


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.shows("lora_refusals")
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(changed_config(r=5), "not floating point", id="another rank"),
        pytest.param(changed_config(r=0), "no scale", id="rank 0"),
        pytest.param(changed_config(r="4"), "Expected `int`", id="a rank that is no number"),
        pytest.param(changed_config(use_dora=True), "use_dora", id="DoRA"),
        pytest.param(changed_config(bias="all"), "bias", id="biases"),
        pytest.param(changed_config(modules_to_save=["lm_head"]), "modules_to_save", id="modules"),
        pytest.param(changed_config(rank_pattern={"q": 1}), "rank_pattern", id="ranks by module"),
        pytest.param(changed_config(peft_type="IA3"), "peft_type", id="no LoRA"),
        pytest.param(without("lora_A"), "is missing", id="half a pair"),
        pytest.param(
            with_tensor("model.layers.9.mlp.up_proj.lora_A.weight", torch.zeros(4, 64)),
            "no linear module",
            id="a layer too many",
        ),
        pytest.param(
            with_tensor("model.embed_tokens.lora_A.weight", torch.zeros(4, 64)),
            "no linear module",
            id="no linear module",
        ),
        pytest.param(
            with_tensor(f"{Q}.lora_A.weight", torch.zeros(4, 65)), "not floating", id="shape"
        ),
        pytest.param(
            with_tensor(f"{Q}.lora_B.weight", torch.full((64, 4), torch.nan)), "NaN", id="NaN"
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(
    build: Build,
    tmp_path: Path,
    spoil: Callable[[Lora], tuple[dict[str, object], Lora]],
    why: str,
) -> None:
    engine = build()
    config, lora = spoil(A)
    folder = lora.save(tmp_path / "bad")
    (folder / "adapter_config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match=why):
        engine.lora.load("bad", 1, folder)

    assert engine.lora.versions() == {}


def test_files_that_are_cut_are_refused(build: Build, tmp_path: Path) -> None:
    folder = A.save(tmp_path / "cut")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ValueError, match="does not lie in its file"):
        build().lora.load("cut", 1, folder)
