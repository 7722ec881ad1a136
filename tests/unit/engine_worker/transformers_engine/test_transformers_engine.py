"""The transformers engine on tiny models, judged by plain forward passes of the same models."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutbus.bus.wire.messages.control import DEVICE
from rolloutbus.bus.wire.messages.generation import Prefix, SamplingParams
from rolloutbus.engine_worker.engine import EngineBusy, EngineDied, PauseMode, Work
from rolloutbus.engine_worker.engines.registry import build_engine
from tests.step_log import DEADLINE_S, StepLog, key
from tests.tiny_models import (
    CONFIGS,
    TOLERANCE,
    VOCAB,
    Build,
    changed,
    check_fresh,
    claim_too_much,
    make_model,
    prompt,
    work,
)


@pytest.mark.shows("temperature")
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_logprobs_are_those_of_a_fresh_forward_pass(
    build: Build, log: StepLog, name: str, prefix_cache: bool
) -> None:
    engine = build(name, slots=3, prefix_cache=prefix_cache, block_size=4, prefill_tokens=16)
    jobs = [work(f"r{i}", 5 + 3 * i, 1 + 7 * i, temperature=0.7) for i in range(7)]
    # The same prompt again and again: shared within a step, and after its first owner ended.
    jobs += [
        Work(key(f"s{i}"), jobs[6].prompt, SamplingParams(9, sampling_seed=i)) for i in range(5)
    ]
    engine.generate(jobs)
    log.wait_finished(*[job.key[0] for job in jobs])
    for job in jobs:
        check_fresh(log, job, make_model(name, 0), job.sampling.temperature)


@pytest.mark.shows("sampling_seed")
def test_tokens_depend_on_the_seed_and_not_on_the_batch(build: Build, log: StepLog) -> None:
    jobs = [work(f"r{i}", 20, 3 + i, sampling_seed=i) for i in range(8)]
    build().generate(jobs)
    names = [job.key[0] for job in jobs]
    log.wait_finished(*names)
    together = [log[name].tokens for name in names]
    alone = build(slots=1)
    alone.generate([Work(key(f"again-{j.key[0]}"), j.prompt, j.sampling) for j in jobs])
    log.wait_finished(*[f"again-{name}" for name in names])
    assert [log[f"again-{name}"].tokens for name in names] == together


def test_without_a_seed_samples_differ(build: Build, log: StepLog) -> None:
    jobs = [Work(key(f"r{i}"), prompt(5), SamplingParams(20, ignore_eos=True)) for i in range(4)]
    build().generate(jobs)
    log.wait_finished("r0", "r1", "r2", "r3")
    assert len({tuple(log[f"r{i}"].tokens) for i in range(4)}) == 4


@pytest.mark.parametrize("n_kept", [1, 7, 19])
def test_a_resumed_request_goes_on_identically(build: Build, log: StepLog, n_kept: int) -> None:
    whole = work("whole", 20, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
    build().generate([whole])
    log.wait_finished("whole")
    tokens = log["whole"].tokens
    kept = Prefix(np.array(tokens[:n_kept], "<i4").tobytes(), bytes(4 * n_kept), [(0, n_kept)])
    build().generate([Work(key("rest"), whole.prompt, whole.sampling, kept)])
    log.wait_finished("rest")
    assert log["rest"].tokens == tokens[n_kept:]
    np.testing.assert_allclose(
        log["rest"].logprobs, log["whole"].logprobs[n_kept:], atol=TOLERANCE, rtol=0
    )


def test_a_complete_prefix_ends_at_once(build: Build, log: StepLog) -> None:
    engine = build()
    cases = {"long": ([5, 6, 7], "length"), "ended": ([5, 1], "stop")}
    for name, (tokens, _) in cases.items():
        kept = Prefix(np.array(tokens, "<i4").tobytes(), bytes(4 * len(tokens)), [])
        engine.generate([Work(key(name), prompt(4), SamplingParams(3), kept)])
    log.wait_finished(*cases)
    for name, (_, reason) in cases.items():
        assert (log[name].tokens, log[name].finishes) == ([], [reason])


@pytest.mark.shows("min_new_tokens", "stop_token_ids")
def test_it_stops_at_eos_at_stop_ids_and_not_before_the_minimum(build: Build, log: StepLog) -> None:
    engine = build()
    hot: dict[str, Any] = {"temperature": 50.0, "max_new_tokens": 400}
    engine.generate(
        [
            work("eos", ignore_eos=False, **hot),
            work("stop", stop_token_ids=[9, 10, 11], **hot),
            work(
                "late", ignore_eos=False, stop_token_ids=list(range(2, 60)), min_new_tokens=6, **hot
            ),
            work("never", **hot),
        ]
    )
    log.wait_finished("eos", "stop", "late", "never")
    assert log["eos"].tokens[-1] == 1
    assert 1 not in log["eos"].tokens[:-1]
    assert log["stop"].tokens[-1] in (9, 10, 11)
    assert all(token in (0, 60, 61, 62, 63) for token in log["late"].tokens[:6])
    assert log["late"].tokens[-1] not in (0, 60, 61, 62, 63)
    assert [log[n].finishes for n in ("eos", "stop", "late")] == [["stop"]] * 3
    assert (len(log["never"].tokens), log["never"].finishes) == (400, ["length"])


def test_abort_ends_exactly_the_named(build: Build, log: StepLog) -> None:
    engine = build(slots=2)
    log.hold(4)
    engine.generate([work("a", 30), work("b", 30), work("waits", 30)])
    log.wait_held()
    assert engine.abort([key("a"), key("waits"), key("unknown")]) == 2
    log.release()
    log.wait_finished("a", "b", "waits")
    assert (len(log["a"].tokens), log["a"].finishes) == (4, ["abort"])
    assert (log["waits"].tokens, log["waits"].finishes) == ([], ["abort"])
    assert (len(log["b"].tokens), log["b"].finishes) == (30, ["length"])
    check_fresh(log, work("b", 30), make_model("llama", 0))
    assert engine.stats().n_kv_tokens == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_token(build: Build, log: StepLog, mode: PauseMode) -> None:
    reference = build()
    reference.generate([work("a", 200)])
    log.wait_finished("a")
    engine = build()
    log.hold(len(log.steps) + 5)
    job = Work(key("b"), work("a").prompt, work("a", 200).sampling)
    engine.generate([job])
    log.call_midway(engine, lambda: engine.pause(mode)).result(DEADLINE_S)
    held = engine.stats()
    assert held.n_kv_tokens == 0 if mode == "retract" else held.n_kv_tokens > 5
    assert not log["b"].finishes
    engine.resume()
    log.wait_finished("b")
    assert log["b"].tokens == log["a"].tokens


@pytest.mark.shows("max_num_seqs", "KV cache pressure")
def test_more_requests_than_slots_or_memory_all_finish(
    build: Build, log: StepLog, seed: int
) -> None:
    rng = random.Random(seed)
    engine = build(slots=6, max_context=64, kv_tokens=64, block_size=4, prefill_tokens=24)
    jobs = [work(f"r{i}", rng.randint(1, 20), rng.randint(1, 44)) for i in range(60)]
    jobs += [
        Work(key(f"s{i}"), jobs[i % 5].prompt, SamplingParams(5, sampling_seed=i))
        for i in range(40)
    ]
    engine.generate(jobs)
    log.wait_finished(*[job.key[0] for job in jobs])
    for job in jobs:
        check_fresh(log, job, make_model("llama", 0))
    # It needs every block there is.
    engine.generate([work("full", 20, 44)])
    log.wait_finished("full")


def test_flushing_forgets_prefixes(build: Build, log: StepLog) -> None:
    engine = build(block_size=4)
    engine.generate([work("a", 8, 8)])
    log.wait_finished("a")
    assert engine.cache.flush([DEVICE]) == 12, "full blocks of 8 + 7 computed tokens"
    assert engine.cache.flush([DEVICE]) == 0


def test_sleep_drops_the_kv_cache_and_waking_brings_it_back(build: Build, log: StepLog) -> None:
    engine = build()
    freed = engine.memory.sleep(["weights", "kv_cache"]).bytes_by_tag
    assert freed["kv_cache"] > 0
    assert freed["weights"] == 0, "a CPU has no better place for them"
    with pytest.raises(EngineBusy):
        engine.weights.install(1, changed(make_model("llama", 0), 1), "keep")
    with pytest.raises(ValueError, match="tags"):
        engine.memory.sleep(["disk"])
    job = work("a")
    engine.generate([job])
    engine.memory.wake_up(["weights"])
    assert engine.stats().steps == 0
    assert engine.memory.wake_up(["kv_cache"]).bytes_by_tag["kv_cache"] == freed["kv_cache"]
    log.wait_finished("a")
    check_fresh(log, job, make_model("llama", 0))


def test_requests_that_do_not_fit_are_refused_together(build: Build, log: StepLog) -> None:
    engine = build(max_context=32)
    with pytest.raises(ValueError, match="max_context"):
        engine.generate([work("a"), work("b", 30)])
    with pytest.raises(ValueError, match="token id"):
        engine.generate([Work(key("c"), np.array([VOCAB], np.int32), SamplingParams(4))])
    engine.generate([work("a")])
    log.wait_finished("a")
    assert log["b"].finishes == []


@pytest.mark.shows("a model that cannot be loaded")
def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path, log: StepLog) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        build_engine("transformers", {"model": str(tmp_path / "nowhere")}, log)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="safetensors"):
        build_engine("transformers", {"model": str(tmp_path)}, log)


@pytest.mark.shows("a model that does not fit")
def test_a_model_that_cannot_fit_is_refused_before_it_is_read(tmp_path: Path, log: StepLog) -> None:
    make_model("llama", 0).save_pretrained(tmp_path)
    claim_too_much(tmp_path)
    with pytest.raises(ValueError, match=r"out of memory .* take [\d,.]+ GiB, of [\d,.]+ GiB"):
        build_engine("transformers", {"model": str(tmp_path), "device": "cpu"}, log)


def test_a_closed_engine_says_so(build: Build) -> None:
    engine = build()
    engine.close()
    with pytest.raises(EngineDied):
        engine.stats()
