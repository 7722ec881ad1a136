"""Weight updates of the transformers engine: every logprob is true at its token's version."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from rolloutbus.bus.wire.messages.generation import Prefix, SamplingParams
from rolloutbus.engine_worker.engine import Bytes, EngineBusy, InFlight, Work
from rolloutbus.engine_worker.engines.transformers.engine import TransformersEngine
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from tests.step_log import DEADLINE_S, StepLog, key
from tests.tiny_models import (
    TOLERANCE,
    Build,
    changed,
    check_fresh,
    fresh,
    make_model,
    work,
)


def swap_midway(
    engine: TransformersEngine, log: StepLog, jobs: list[Work], update: Callable[[], object]
) -> None:
    """Run `jobs` and call `update` from another thread after the fifth step."""
    log.hold(5)
    engine.generate(jobs)
    log.call_midway(engine, update).result(DEADLINE_S)
    log.wait_finished(*[job.key[0] for job in jobs])


@torch.no_grad()
def by_runs(models: dict[int, Any], w: Work, tokens: list[int], versions: list[int]) -> list[float]:
    """Logprobs with KV built run by run: each token is fed at the version of the next."""
    cache = cast("Any", transformers.DynamicCache)()
    feed, logprobs = torch.as_tensor(w.prompt, dtype=torch.int64)[None], list[float]()
    for token, version in zip(tokens, versions, strict=True):
        output = models[version](input_ids=feed, past_key_values=cache, use_cache=True)
        logprobs.append(float(torch.log_softmax(output.logits[0, -1].float(), -1)[token]))
        feed = torch.tensor([[token]])
    return logprobs


@pytest.mark.parametrize("in_flight", ["finish_old", "keep", "retract", "abort"])
def test_logprobs_are_true_across_an_update(
    build: Build, log: StepLog, in_flight: InFlight
) -> None:
    old, new = make_model("llama", 0), make_model("llama", 0)
    tensors = changed(new, 1)
    models = {0: old, 4: new}
    engine = build(block_size=4)
    jobs = [work(f"r{i}", 150, 4 + 5 * i) for i in range(6)]
    swap_midway(engine, log, jobs, lambda: engine.weights.install(4, tensors, in_flight))
    # The prompt of r0 again: nothing of the old weights' KV may be reused.
    after = Work(key("after"), jobs[0].prompt, jobs[0].sampling)
    engine.generate([after])
    log.wait_finished("after")
    check_fresh(log, after, new)
    assert set(log["after"].versions) == {4}
    for job in jobs:
        emitted = log[job.key[0]]
        tokens = np.concatenate([job.prompt, np.array(emitted.tokens, np.int32)])
        if in_flight == "keep":
            want = by_runs(models, job, emitted.tokens, emitted.versions)
        else:
            each = {v: fresh(model, tokens, len(job.prompt)) for v, model in models.items()}
            want = [each[v][i] for i, v in enumerate(emitted.versions)]
        np.testing.assert_allclose(emitted.logprobs, want, atol=TOLERANCE, rtol=0)
        crosses = in_flight in ("keep", "retract")
        assert set(emitted.versions) == ({0, 4} if crosses else {0})
        assert emitted.finishes == (["abort"] if in_flight == "abort" else ["length"])


def test_no_turn_reuses_kv_that_spans_an_update(build: Build, log: StepLog) -> None:
    new = make_model("llama", 0)
    tensors = changed(new, 1)
    engine = build(block_size=4)
    job = work("first", 150)
    swap_midway(engine, log, [job], lambda: engine.weights.install(1, tensors, "keep"))
    said = np.concatenate([job.prompt, np.array(log["first"].tokens, np.int32)])
    turn = Work(key("second"), said, SamplingParams(8, sampling_seed=0))
    engine.generate([turn])
    log.wait_finished("second")
    check_fresh(log, turn, new)


def test_a_prompt_half_computed_at_an_in_place_update_starts_again(
    build: Build, log: StepLog
) -> None:
    new = make_model("llama", 0)
    tensors = changed(new, 1)
    engine = build(prefill_tokens=8, block_size=4)
    jobs = [work("short", 150, 3), work("long", 5, 200)]
    swap_midway(engine, log, jobs, lambda: engine.weights.install(1, tensors, "keep"))
    assert set(log["long"].versions) == {1}
    check_fresh(log, jobs[1], new)


def test_aborted_at_an_update_and_resumed_is_true_at_each_version(
    build: Build, log: StepLog
) -> None:
    old, new = make_model("llama", 0), make_model("llama", 0)
    tensors = changed(new, 1)
    engine = build()
    job = work("a", 150)
    swap_midway(engine, log, [job], lambda: engine.weights.install(1, tensors, "abort"))
    first = log["a"].tokens
    kept = Prefix(np.array(first, "<i4").tobytes(), bytes(4 * len(first)), [(0, len(first))])
    engine.generate([Work(key("b"), job.prompt, job.sampling, kept)])
    log.wait_finished("b")
    tokens = np.concatenate([job.prompt, np.array(first + log["b"].tokens, np.int32)])
    n, n_first = len(job.prompt), len(first)
    want = fresh(old, tokens, n)[:n_first] + fresh(new, tokens, n)[n_first:]
    got = log["a"].logprobs + log["b"].logprobs
    assert len(got) == 150
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.shows("weights that do not fit")
def test_an_update_that_does_not_fit_names_why_and_touches_nothing(
    build: Build, log: StepLog
) -> None:
    engine = build("qwen2")
    names = [spec.name for spec in engine.weights.specs()]
    assert "lm_head.weight" not in names, "tied weights appear once"
    good = changed(make_model("qwen2", 0), 1)
    norm = "model.norm.weight"
    bad = {
        "'extra': the engine has no such tensor": {**good, "extra": good[norm]},
        f"{norm}': it is missing": {n: t for n, t in good.items() if n != norm},
        f"{norm}': 128 bytes": {**good, norm: good[norm][:128]},
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.weights.install(1, tensors, "keep")
    job = work("a")
    engine.generate([job])
    log.wait_finished("a")
    assert set(log["a"].versions) == {0}
    check_fresh(log, job, make_model("qwen2", 0))


def check_installed(
    build: Build, log: StepLog, tensors: Mapping[str, RawTensor], model: torch.nn.Module
) -> None:
    """An engine takes these tensors, and then samples as `model` does."""
    engine = build("qwen2")
    assert engine.weights.install(2, tensors, "keep").version == 2
    job = work("a")
    engine.generate([job])
    log.wait_finished("a")
    check_fresh(log, job, model)


def test_read_only_and_unaligned_bytes_are_installed(build: Build, log: StepLog) -> None:
    model = make_model("qwen2", 0)
    tensors: dict[str, Bytes] = {}
    for name, raw in changed(model, 1).items():
        shifted = np.frombuffer(b"x" + raw.tobytes(), np.uint8)[1:]
        tensors[name] = cast("Bytes", shifted)
    check_installed(build, log, tensors, model)


def test_tensors_of_a_device_are_installed_as_they_are(build: Build, log: StepLog) -> None:
    model = make_model("qwen2", 0)
    tensors = {name: torch.as_tensor(raw) for name, raw in changed(model, 1).items()}
    check_installed(build, log, tensors, model)


def test_finish_old_is_refused_while_paused_with_requests_running(
    build: Build, log: StepLog
) -> None:
    engine = build()
    log.hold(3)
    engine.generate([work("a", 200)])
    log.call_midway(engine, lambda: engine.pause("in_place")).result(DEADLINE_S)
    with pytest.raises(EngineBusy):
        engine.weights.install(1, changed(make_model("llama", 0), 1), "finish_old")
