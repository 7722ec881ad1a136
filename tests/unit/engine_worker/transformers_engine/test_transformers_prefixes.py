"""What the transformers engine tells of its prefix cache."""

import dataclasses

import numpy as np

from rolloutbus.bus.prefix_hashes import marks_of, unpacked
from rolloutbus.bus.wire.messages.control import DEVICE
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.engine_worker.engine import Int32s, Work
from rolloutbus.engine_worker.engines.transformers.engine import TransformersEngine
from tests.lora_adapters import random_lora
from tests.step_log import StepLog, key
from tests.tiny_models import Build, changed, make_model, prompt


def job(name: str, tokens: Int32s) -> Work:
    return Work(
        key(name), tokens, SamplingParams(max_new_tokens=4, ignore_eos=True, sampling_seed=1)
    )


def run(engine: TransformersEngine, log: StepLog, *jobs: Work) -> None:
    engine.generate(jobs)
    log.wait_finished(*[each.key[0] for each in jobs])


def marks(tokens: Int32s) -> set[int]:
    return set(unpacked(marks_of(tokens.tobytes())))


def told(engine: TransformersEngine) -> tuple[int, set[int], set[int]]:
    assert engine.prefixes is not None
    news = engine.prefixes.take()
    assert news is not None
    return news.seq, set(unpacked(news.added)), set(unpacked(news.removed))


def test_the_beginnings_of_what_was_computed_are_told(build: Build, log: StepLog) -> None:
    engine = build(report_prefixes=True)
    tokens = prompt(200)
    run(engine, log, job("a", tokens))
    assert told(engine) == (0, marks(tokens), set())
    run(engine, log, job("b", np.concatenate([tokens, prompt(100, seed=5)])))
    seq, added, removed = told(engine)
    assert (seq, removed) == (1, set())
    assert len(added) == 1
    assert engine.prefixes is not None
    assert engine.prefixes.take() is None


def test_what_is_evicted_is_told_as_gone(build: Build, log: StepLog) -> None:
    engine = build(report_prefixes=True, kv_tokens=512, max_context=400)
    first = prompt(300, seed=1)
    run(engine, log, job("a", first))
    told(engine)
    others = [prompt(300, seed=n) for n in (2, 3)]
    run(engine, log, *[job(f"b{n}", tokens) for n, tokens in enumerate(others)])
    _, added, removed = told(engine)
    assert marks(first) & removed
    assert added <= marks(others[0]) | marks(others[1])


def test_a_flushed_cache_has_nothing(build: Build, log: StepLog) -> None:
    engine = build(report_prefixes=True)
    tokens = prompt(200)
    run(engine, log, job("a", tokens))
    told(engine)
    engine.cache.flush([DEVICE])
    assert told(engine)[2] == marks(tokens)


def test_new_weights_clear_what_was_told_of_the_old(build: Build, log: StepLog) -> None:
    engine = build(report_prefixes=True)
    tokens = prompt(200)
    run(engine, log, job("a", tokens))
    told(engine)
    engine.weights.install(1, changed(make_model("llama", 0), 1), "finish_old")
    run(engine, log, job("b", tokens))
    assert told(engine) == (0, marks(tokens), set())


def test_kv_of_an_adapter_is_not_told(build: Build, log: StepLog) -> None:
    engine = build(report_prefixes=True)
    engine.lora.load("math", 1, random_lora(make_model("llama", 0), 1).in_memory())
    run(engine, log, dataclasses.replace(job("a", prompt(200)), lora="math"))
    assert engine.prefixes is not None
    assert engine.prefixes.take() is None


def test_an_engine_that_was_not_asked_to_tells_nothing(build: Build) -> None:
    assert build().prefixes is None
