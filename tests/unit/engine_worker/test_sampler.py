"""The vectorised sampler against a slow one that handles one row at a time."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

import random
from typing import Any

import numpy as np
import pytest
import torch

from rolloutbus.bus.wire.messages.generation import Processor, SamplingParams, Want
from rolloutbus.engine_worker.engine import EngineFacts, Work
from rolloutbus.engine_worker.engines.shared.processors import Processors
from rolloutbus.engine_worker.engines.shared.request import (
    EngineRequest,
    WantedTokens,
    open_request,
)
from rolloutbus.engine_worker.engines.transformers.sampler import Draw, Sampler, uniforms
from tests.step_log import key

VOCAB = 50
FACTS = EngineFacts("test", VOCAB, 1000, 8, (1,))
CPU = torch.device("cpu")
DIGITS = 1e-5
"""What float32 may lose on the way from logits to probabilities."""


def request(
    sampling: SamplingParams, generated: list[int] | None = None, prompt: int = 6
) -> EngineRequest:
    opened = open_request(
        Work(key("a"), np.arange(2, 2 + prompt, dtype=np.int32), sampling), FACTS, 0
    )
    opened.tokens = list(generated or [])
    return opened


def logits(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(requests: list[EngineRequest], scores: torch.Tensor) -> Draw:
    """One draw with the requests in shuffled slots."""
    slots = np.array([(3 * i + 1) % 16 for i in range(len(requests))])
    sampler = Sampler(16, VOCAB, CPU)
    for slot, one in zip(slots.tolist(), requests, strict=True):
        sampler.enter(slot, one)
    return sampler.sample(scores.clone(), slots)


def reference(one: EngineRequest, row: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities float64 [vocab] before and after truncation, one rule at a time."""
    s = one.sampling
    scores = row.double().numpy().copy()
    for token in range(VOCAB):
        count = one.tokens.count(token)
        if count or token in one.prompt.tolist():
            by = s.repetition_penalty
            scores[token] = scores[token] / by if scores[token] > 0 else scores[token] * by
        scores[token] -= s.frequency_penalty * count + s.presence_penalty * (count > 0)
        if len(one.tokens) < s.min_new_tokens and token in one.end_ids:
            scores[token] = -np.inf
    if s.temperature:
        scores /= s.temperature
    full = np.exp(scores - scores.max())
    full /= full.sum()
    order = np.argsort(-full, kind="stable")
    kept, before = np.zeros(VOCAB), 0.0
    for rank, token in enumerate(order):
        is_kept = (not s.top_k or rank < s.top_k) and before < s.top_p
        if (is_kept and full[token] >= full.max() * s.min_p) or rank == 0:
            kept[token] = full[token]
        before += full[token]
    return full, kept / kept.sum()


def is_close_call(sampling: SamplingParams, full: np.ndarray) -> bool:
    """Whether the last digits of a number decide what is kept: float32 may see it otherwise."""
    falling = np.sort(full[full > 0])[::-1]
    gaps = [-np.diff(np.log(falling))]
    if sampling.top_p < 1.0:
        gaps.append(np.abs(np.cumsum(falling) - sampling.top_p))
    if sampling.min_p:
        gaps.append(np.abs(falling / falling[0] - sampling.min_p))
    return float(np.concatenate(gaps).min()) < DIGITS


def random_sampling(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:  # noqa: ANN401
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        max_new_tokens=100,
        min_new_tokens=maybe(50, 0),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=maybe(rng.uniform(0.05, 0.95), 1.0),
        top_k=maybe(rng.randint(1, 60), 0),
        min_p=maybe(rng.uniform(0.0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        frequency_penalty=maybe(rng.uniform(-1.0, 1.0), 0.0),
        presence_penalty=maybe(rng.uniform(-1.0, 1.0), 0.0),
        sampling_seed=rng.getrandbits(64),
        stop_token_ids=maybe([7, 8, 9], []),
    )


def test_every_row_of_a_mixed_batch_follows_its_own_parameters(rng: random.Random) -> None:
    n_judged = 0
    for _ in range(40):
        requests = [
            request(random_sampling(rng), [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))])
            for _ in range(rng.randint(1, 8))
        ]
        scores = logits(len(requests), rng.getrandbits(32))
        draw = sample(requests, scores)
        behaviour = draw.logprobs if draw.behaviour_logprobs is None else draw.behaviour_logprobs
        for i, one in enumerate(requests):
            full, kept = reference(one, scores[i])
            if is_close_call(one.sampling, full):
                continue
            n_judged += 1
            token = int(draw.tokens[i])
            assert abs(draw.logprobs[i] - np.log(full[token])) < 1e-4
            if one.sampling.temperature == 0:
                assert token == int(full.argmax())
                kept = full
            assert abs(behaviour[i] - np.log(kept[token])) < 1e-4
    assert n_judged > 20


def test_tokens_come_as_often_as_their_probability_says() -> None:
    n = 20_000
    sampling = SamplingParams(temperature=0.8, top_p=0.9, sampling_seed=0)
    scores = logits(1, 5)
    sampler = Sampler(n, VOCAB, CPU)
    for seed in range(n):
        sampler.enter(seed, request(SamplingParams(temperature=0.8, top_p=0.9, sampling_seed=seed)))
    draw = sampler.sample(scores.repeat(n, 1), np.arange(n))
    seen = np.bincount(draw.tokens, minlength=VOCAB) / n
    _, kept = reference(request(sampling), scores[0])
    assert np.abs(seen - kept).max() < 5 * np.sqrt(0.25 / n)
    assert (seen[kept == 0] == 0).all()


def test_uniforms_are_even_and_differ_between_seeds_and_indices() -> None:
    seeds, indices = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200), indexing="ij")
    drawn = uniforms(seeds.ravel(), indices.ravel())
    assert len(np.unique(drawn)) == 40_000
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts, _ = np.histogram(drawn, bins=50, range=(0.0, 1.0))
    assert np.abs(counts - 800).max() < 5 * np.sqrt(800)
    grid = drawn.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03


def test_a_rows_draw_does_not_depend_on_its_neighbours() -> None:
    requests = [request(SamplingParams(sampling_seed=i, top_k=5 * i)) for i in range(6)]
    scores = logits(6, 1)
    together = sample(requests, scores)
    alone = [sample([one], scores[i : i + 1]).tokens[0] for i, one in enumerate(requests)]
    assert together.tokens.tolist() == alone


def test_behaviour_logprobs_come_only_when_a_row_truncates() -> None:
    plain = [
        request(SamplingParams(sampling_seed=1)),
        request(SamplingParams(temperature=0.0, top_k=3)),
    ]
    assert sample(plain, logits(2, 0)).behaviour_logprobs is None
    mixed = sample([*plain, request(SamplingParams(sampling_seed=1, top_k=1))], logits(3, 0))
    assert mixed.behaviour_logprobs is not None
    assert mixed.behaviour_logprobs[:2].tolist() == mixed.logprobs[:2].tolist()
    assert abs(mixed.behaviour_logprobs[2]) < 1e-6


def test_penalties_count_what_was_sampled_since() -> None:
    one = request(SamplingParams(temperature=0.0, presence_penalty=100.0), prompt=1)
    sampler = Sampler(1, VOCAB, CPU)
    sampler.enter(0, one)
    scores = logits(1, 3)
    drawn = [int(sampler.sample(scores.clone(), np.array([0])).tokens[0]) for _ in range(VOCAB)]
    assert drawn == np.argsort(-scores[0].numpy()).tolist()


def test_a_slot_forgets_its_last_request() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    before = SamplingParams(temperature=0.0, repetition_penalty=2.0, min_new_tokens=9, top_k=2)
    sampler.enter(0, request(before, list(range(VOCAB))))
    sampler.sample(logits(1, 0), np.array([0]))
    scores = logits(1, 4)
    sampler.enter(0, request(SamplingParams(sampling_seed=5)))
    again = sampler.sample(scores.clone(), np.array([0]))
    assert again.tokens[0] == sample([request(SamplingParams(sampling_seed=5))], scores).tokens[0]
    assert again.behaviour_logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_only_rows_without_a_distribution_fail(value: float, temperature: float) -> None:
    requests = [
        request(SamplingParams(sampling_seed=seed, temperature=temperature)) for seed in (1, 2)
    ]
    scores = logits(2, 6)
    alone = sample(requests[1:], scores[1:].clone())
    scores[0] = value
    drawn = sample(requests, scores)
    assert {row: problem.code for row, problem in drawn.failed.items()} == {0: "broken_weights"}
    assert drawn.take([1]).tokens.tolist() == alone.tokens.tolist()


def ruled(sampling: SamplingParams, **more: Any) -> EngineRequest:  # noqa: ANN401
    opened = request(sampling)
    for name, value in more.items():
        setattr(opened, name, value)
    return opened


def test_bias_comes_before_penalties_and_processors_before_the_temperature() -> None:
    sampling = SamplingParams(
        temperature=0.5, frequency_penalty=1.0, logit_bias={3: 2.0}, max_new_tokens=9
    )
    mask = Processor("action_mask", {"allowed": [3, 4]})
    one = ruled(sampling, tokens=[3, 3], processors=Processors({}).build([mask], VOCAB))
    scores = torch.zeros(1, VOCAB)
    drawn = sample([one], scores)
    # Token 3: 0 + 2 - 2 x 1; token 4: 0. Both divided by 0.5, and nothing else is left.
    assert int(drawn.tokens[0]) in (3, 4)
    assert drawn.logprobs[0] == pytest.approx(np.log(0.5))


def test_rules_of_one_row_leave_the_others_alone() -> None:
    processors = Processors({}).build([Processor("disallowed_tokens", {"blocked": [1]})], VOCAB)
    greedy = SamplingParams(temperature=0.0)
    plain, scores = request(greedy), torch.zeros(2, VOCAB)
    scores[:, 1] = 5.0
    scores[:, 2] = 4.0
    assert sample([ruled(greedy, processors=processors), plain], scores).tokens.tolist() == [2, 1]


def test_a_row_that_nothing_is_left_of_fails_alone() -> None:
    asked = [
        Processor("action_mask", {"allowed": [5]}),
        Processor("disallowed_tokens", {"blocked": [5]}),
    ]
    one = ruled(SamplingParams(), processors=Processors({}).build(asked, VOCAB))
    drawn = sample([one, request(SamplingParams())], logits(2, 1))
    assert list(drawn.failed) == [0]
    assert np.isfinite(drawn.logprobs[1])


@pytest.mark.parametrize(
    "asked",
    [
        [Processor("action_mask", {"allowed": [1], "mask_value": 3e38})],
        [Processor("temperature_schedule", {"initial": 1e-6, "final": 1e-6, "warmup_tokens": 0})]
        * 6,
    ],
)
def test_processors_that_leave_numbers_too_large_are_not_the_weights_fault(
    asked: list[Processor],
) -> None:
    sampling = SamplingParams(temperature=1e-6)
    one = ruled(sampling, processors=Processors({}).build(asked, VOCAB))
    drawn = sample([one, request(SamplingParams())], logits(2, 1))
    assert {row: problem.field for row, problem in drawn.failed.items()} == {0: "processors"}


def test_what_is_wanted_comes_from_the_distribution_that_was_drawn_from() -> None:
    want = Want(top_logprobs=3, logprobs_of=[4, 9], sampling_mask=True)
    rows = [
        ruled(SamplingParams(temperature=0.8, top_k=5), wanted=WantedTokens(want)),
        request(SamplingParams()),
        ruled(SamplingParams(temperature=0.0, top_p=0.5), wanted=WantedTokens(want)),
    ]
    scores = logits(3, 2)
    drawn = sample(rows, scores)
    assert sorted(drawn.wanted) == [0, 2]
    for row, temperature in ((0, 0.8), (2, 1.0)):
        found, truth = drawn.wanted[row], torch.log_softmax(scores[row] / temperature, -1)
        best = truth.topk(3)
        assert found.top_token_ids.tolist() == best.indices.tolist()
        assert found.top_logprobs.tolist() == pytest.approx(best.values.tolist())
        assert found.logprobs_of.tolist() == pytest.approx(truth[[4, 9]].tolist())
    assert sorted(drawn.wanted[0].support) == sorted(scores[0].topk(5).indices.tolist())
    assert drawn.wanted[2].support.tolist() == [int(drawn.tokens[2])]


def test_rows_that_are_taken_keep_what_is_told_of_them() -> None:
    want = WantedTokens(Want(logprobs_of=[4]))
    rows = [
        request(SamplingParams()),
        ruled(SamplingParams(top_k=3), wanted=want),
        request(SamplingParams()),
    ]
    drawn = sample(rows, logits(3, 3))
    taken = drawn.take([2, 1])
    assert taken.tokens.tolist() == drawn.tokens[[2, 1]].tolist()
    assert taken.wanted == {1: drawn.wanted[1]}
