"""The transformers engine on tiny models, judged by plain forward passes of the same models."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from bus.messages.generation import Prefix, Sampling
from engine_worker.engine import Bytes, InFlight, PauseMode, Work
from engine_worker.engines.registry import build_engine
from engine_worker.engines.step_loop import EngineBusy, EngineDied
from engine_worker.engines.transformers_engine import TransformersEngine
from engine_worker.engines.transformers_settings import TransformersSettings
from tests.step_log import StepLog, key

VOCAB = 64
TOLERANCE = 1e-4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "sliding": ("MistralConfig", {"sliding_window": 7}),
    "mixed": ("Gemma2Config", {"sliding_window": 7}),
    "positions": ("GPT2Config", {}),
}
Build = Callable[..., TransformersEngine]
Weights = dict[str, torch.Tensor]


def make_model(name: str, seed: int) -> Any:  # noqa: ANN401 - transformers is untyped
    kind, extra = CONFIGS[name]
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    config = getattr(transformers, kind)(**SHAPE, **extra)
    return cast("Any", transformers.AutoModelForCausalLM).from_config(config).eval()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    found: dict[str, Path] = {}
    for name in CONFIGS:
        found[name] = tmp_path_factory.mktemp(name)
        make_model(name, 0).save_pretrained(found[name])
    return found


@pytest.fixture
def log() -> StepLog:
    return StepLog()


@pytest.fixture
def build(log: StepLog, paths: dict[str, Path]) -> Iterator[Build]:
    engines: list[TransformersEngine] = []

    def build(name: str = "llama", **settings: Any) -> TransformersEngine:  # noqa: ANN401
        settings = {"device": "cpu", "slots": 8, "threads": 1, **settings}
        engines.append(TransformersEngine(TransformersSettings(str(paths[name]), **settings), log))
        return engines[-1]

    yield build
    log.release()
    for engine in engines:
        engine.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(2)
    yield pool
    pool.shutdown(wait=False)


def prompt(n: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(2, VOCAB, n).astype(np.int32)


def work(name: str, n: int = 12, n_prompt: int = 9, **sampling: Any) -> Work:  # noqa: ANN401
    """A request whose prompt depends on its name."""
    options: dict[str, Any] = {"ignore_eos": True, "seed": 3, "max_new_tokens": n, **sampling}
    return Work(key(name), prompt(n_prompt, sum(name.encode())), Sampling(**options))


def changed(model: Any, seed: int) -> dict[str, Bytes]:  # noqa: ANN401
    """New weights for `model`, installed in it and returned as raw bytes."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return {n: p.detach().numpy().reshape(-1).view(np.uint8) for n, p in model.named_parameters()}


@torch.no_grad()
def fresh(model: Any, tokens: np.ndarray, n_prompt: int, temperature: float = 1.0) -> list[float]:  # noqa: ANN401
    """Logprob of every token after the prompt, from one forward pass over all of them."""
    logits = model(input_ids=torch.as_tensor(tokens, dtype=torch.int64)[None]).logits[0].float()
    logprobs = torch.log_softmax(logits[n_prompt - 1 : -1] / temperature, -1)
    ids = torch.as_tensor(tokens[n_prompt:], dtype=torch.int64)
    return [float(x) for x in logprobs.gather(1, ids[:, None])[:, 0]]


def check_fresh(log: StepLog, w: Work, model: Any, temperature: float = 1.0) -> None:  # noqa: ANN401
    """The emitted logprobs are those of `model`, all of them."""
    emitted = log[w.key[0]]
    tokens = np.concatenate([w.prompt, np.array(emitted.tokens, np.int32)])
    want = fresh(model, tokens, len(w.prompt), temperature)
    np.testing.assert_allclose(emitted.logprobs, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_logprobs_are_those_of_a_fresh_forward_pass(
    build: Build, log: StepLog, name: str, prefix_cache: bool
) -> None:
    engine = build(name, slots=3, prefix_cache=prefix_cache, block_size=4, prefill_tokens=16)
    jobs = [work(f"r{i}", 5 + 3 * i, 1 + 7 * i, temperature=0.7) for i in range(7)]
    # The same prompt again and again: shared within a step, and after its first owner ended.
    jobs += [Work(key(f"s{i}"), jobs[6].prompt, Sampling(9, seed=i)) for i in range(5)]
    engine.generate(jobs)
    log.wait_finished(*[job.key[0] for job in jobs])
    for job in jobs:
        check_fresh(log, job, make_model(name, 0), job.sampling.temperature)


def test_tokens_depend_on_the_seed_and_not_on_the_batch(build: Build, log: StepLog) -> None:
    jobs = [work(f"r{i}", 20, 3 + i, seed=i) for i in range(8)]
    build().generate(jobs)
    names = [job.key[0] for job in jobs]
    log.wait_finished(*names)
    together = [log[name].tokens for name in names]
    alone = build(slots=1)
    alone.generate([Work(key(f"again-{j.key[0]}"), j.prompt, j.sampling) for j in jobs])
    log.wait_finished(*[f"again-{name}" for name in names])
    assert [log[f"again-{name}"].tokens for name in names] == together


def test_without_a_seed_samples_differ(build: Build, log: StepLog) -> None:
    jobs = [Work(key(f"r{i}"), prompt(5), Sampling(20, ignore_eos=True)) for i in range(4)]
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
        engine.generate([Work(key(name), prompt(4), Sampling(3), kept)])
    log.wait_finished(*cases)
    for name, (_, reason) in cases.items():
        assert (log[name].tokens, log[name].finishes) == ([], [reason])


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
def test_a_pause_changes_no_token(
    build: Build, log: StepLog, pool: ThreadPoolExecutor, mode: PauseMode
) -> None:
    reference = build()
    reference.generate([work("a", 200)])
    log.wait_finished("a")
    engine = build()
    log.hold(len(log.steps) + 5)
    job = Work(key("b"), work("a").prompt, work("a", 200).sampling)
    engine.generate([job])
    log.wait_held()
    paused = pool.submit(engine.pause, mode)
    log.release()
    paused.result(10)
    held = engine.stats()
    assert held.n_kv_tokens == 0 if mode == "retract" else held.n_kv_tokens > 5
    assert not log["b"].finishes
    engine.resume()
    log.wait_finished("b")
    assert log["b"].tokens == log["a"].tokens


def swap_midway(
    engine: TransformersEngine, log: StepLog, jobs: list[Work], update: Callable[[], object]
) -> None:
    """Run `jobs` and call `update` from another thread after the fifth step."""
    with ThreadPoolExecutor(1) as pool:
        log.hold(5)
        engine.generate(jobs)
        log.wait_held()
        swapped = pool.submit(update)
        log.release()
        swapped.result(20)
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


@pytest.mark.parametrize("in_flight", ["finish_old", "in_place", "retract", "abort"])
def test_logprobs_are_true_across_an_update(
    build: Build, log: StepLog, in_flight: InFlight
) -> None:
    old, new = make_model("llama", 0), make_model("llama", 0)
    tensors = changed(new, 1)
    models = {0: old, 4: new}
    engine = build(block_size=4)
    jobs = [work(f"r{i}", 150, 4 + 5 * i) for i in range(6)]
    swap_midway(engine, log, jobs, lambda: engine.install(4, tensors, in_flight))
    # The prompt of r0 again: nothing of the old weights' KV may be reused.
    after = Work(key("after"), jobs[0].prompt, jobs[0].sampling)
    engine.generate([after])
    log.wait_finished("after")
    check_fresh(log, after, new)
    assert set(log["after"].versions) == {4}
    for job in jobs:
        emitted = log[job.key[0]]
        tokens = np.concatenate([job.prompt, np.array(emitted.tokens, np.int32)])
        if in_flight == "in_place":
            want = by_runs(models, job, emitted.tokens, emitted.versions)
        else:
            each = {v: fresh(model, tokens, len(job.prompt)) for v, model in models.items()}
            want = [each[v][i] for i, v in enumerate(emitted.versions)]
        np.testing.assert_allclose(emitted.logprobs, want, atol=TOLERANCE, rtol=0)
        crosses = in_flight in ("in_place", "retract")
        assert set(emitted.versions) == ({0, 4} if crosses else {0})
        assert emitted.finishes == (["abort"] if in_flight == "abort" else ["length"])


def test_no_turn_reuses_kv_that_spans_an_update(build: Build, log: StepLog) -> None:
    new = make_model("llama", 0)
    tensors = changed(new, 1)
    engine = build(block_size=4)
    job = work("first", 150)
    swap_midway(engine, log, [job], lambda: engine.install(1, tensors, "in_place"))
    said = np.concatenate([job.prompt, np.array(log["first"].tokens, np.int32)])
    turn = Work(key("second"), said, Sampling(8, seed=0))
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
    swap_midway(engine, log, jobs, lambda: engine.install(1, tensors, "in_place"))
    assert set(log["long"].versions) == {1}
    check_fresh(log, jobs[1], new)


def test_aborted_at_an_update_and_resumed_is_true_at_each_version(
    build: Build, log: StepLog
) -> None:
    old, new = make_model("llama", 0), make_model("llama", 0)
    tensors = changed(new, 1)
    engine = build()
    job = work("a", 150)
    swap_midway(engine, log, [job], lambda: engine.install(1, tensors, "abort"))
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


def test_an_update_that_does_not_fit_names_why_and_touches_nothing(
    build: Build, log: StepLog
) -> None:
    engine = build("qwen2")
    names = [spec.name for spec in engine.weight_specs()]
    assert "lm_head.weight" not in names, "tied weights appear once"
    good = changed(make_model("qwen2", 0), 1)
    norm = "model.norm.weight"
    nan = np.full(64, np.nan, np.float32).view(np.uint8)
    bad = {
        "unknown: extra": {**good, "extra": good[norm]},
        f"missing: {norm}": {n: t for n, t in good.items() if n != norm},
        f"{norm}: 128 bytes": {**good, norm: good[norm][:128]},
        f"{norm}: holds infinity or NaN": {**good, norm: nan},
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.install(1, tensors, "in_place")
    job = work("a")
    engine.generate([job])
    log.wait_finished("a")
    assert set(log["a"].versions) == {0}
    check_fresh(log, job, make_model("qwen2", 0))


def test_read_only_and_unaligned_bytes_are_installed(build: Build, log: StepLog) -> None:
    model = make_model("qwen2", 0)
    tensors: dict[str, Bytes] = {}
    for name, raw in changed(model, 1).items():
        shifted = np.frombuffer(b"x" + raw.tobytes(), np.uint8)[1:]
        tensors[name] = cast("Bytes", shifted)
    engine = build("qwen2")
    assert engine.install(2, tensors, "in_place").version == 2
    job = work("a")
    engine.generate([job])
    log.wait_finished("a")
    check_fresh(log, job, model)


def test_finish_old_is_refused_while_paused_with_requests_running(
    build: Build, log: StepLog, pool: ThreadPoolExecutor
) -> None:
    engine = build()
    log.hold(3)
    engine.generate([work("a", 200)])
    log.wait_held()
    paused = pool.submit(engine.pause, "in_place")
    log.release()
    paused.result(10)
    with pytest.raises(EngineBusy):
        engine.install(1, changed(make_model("llama", 0), 1), "finish_old")


def test_more_requests_than_slots_or_memory_all_finish(
    build: Build, log: StepLog, seed: int
) -> None:
    rng = random.Random(seed)
    engine = build(slots=6, max_context=64, kv_tokens=64, block_size=4, prefill_tokens=24)
    jobs = [work(f"r{i}", rng.randint(1, 20), rng.randint(1, 44)) for i in range(60)]
    jobs += [Work(key(f"s{i}"), jobs[i % 5].prompt, Sampling(5, seed=i)) for i in range(40)]
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
    assert engine.flush_cache() == 12, "full blocks of 8 + 7 computed tokens"
    assert engine.flush_cache() == 0


def test_sleep_drops_the_kv_cache_and_waking_brings_it_back(build: Build, log: StepLog) -> None:
    engine = build()
    freed = engine.sleep(["weights", "kv_cache"]).bytes_by_tag
    assert freed["kv_cache"] > 0
    assert freed["weights"] == 0, "a CPU has no better place for them"
    with pytest.raises(EngineBusy):
        engine.install(1, changed(make_model("llama", 0), 1), "in_place")
    with pytest.raises(ValueError, match="tags"):
        engine.sleep(["disk"])
    job = work("a")
    engine.generate([job])
    engine.wake_up(["weights"])
    assert engine.stats().steps == 0
    assert engine.wake_up(["kv_cache"]).bytes_by_tag["kv_cache"] == freed["kv_cache"]
    log.wait_finished("a")
    check_fresh(log, job, make_model("llama", 0))


def test_requests_that_do_not_fit_are_refused_together(build: Build, log: StepLog) -> None:
    engine = build(max_context=32)
    with pytest.raises(ValueError, match="max_context"):
        engine.generate([work("a"), work("b", 30)])
    with pytest.raises(ValueError, match="token id"):
        engine.generate([Work(key("c"), np.array([VOCAB], np.int32), Sampling(4))])
    engine.generate([work("a")])
    log.wait_finished("a")
    assert log["b"].finishes == []


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path, log: StepLog) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        build_engine("transformers", {"model": str(tmp_path / "nowhere")}, log)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="safetensors"):
        build_engine("transformers", {"model": str(tmp_path)}, log)


def test_a_closed_engine_says_so(build: Build) -> None:
    engine = build()
    engine.close()
    with pytest.raises(EngineDied):
        engine.stats()
