"""Rules of single requests in the sampler of a GPU, with steps that overlap; grammars and kernels.

Rows of every batch differ in their rules. What each must say is computed on the CPU.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch

from rolloutbus import Grammar, Rollout, RolloutClient, SamplingParams, Want
from rolloutbus.engine_worker.engines.shared.row_rules import penalised
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.logit_processors import (
    action_mask,
    disallowed_tokens,
    temperature_schedule,
)
from tests.gpu.gpu_fleets import DEADLINE_S, SLOTS, Served, gpu_fleet, running
from tests.gpu.tiny import NEAR, Logits, load_tiny, logits_of, save_tiny
from tests.integration.live_fleet import Streamed
from tests.sglang.models import EOS, FIRST_BYTE, VOCAB_SIZE, byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

N_TOKENS = 96
GREEDY = SamplingParams(max_new_tokens=N_TOKENS, temperature=0.0, ignore_eos=True)
TIED = 0.15
"""Logits nearer than this are in either order in bfloat16."""
LOW, HIGH = list(range(100, 140)), list(range(400))
REPEATED, FREQUENT, PRESENT = 1.4, 0.5, 0.3
COLD, HOT, WARMUP = 0.5, 2.0, 40


class Case(NamedTuple):
    """Rules of one request."""

    sampling: SamplingParams
    options: GenerateOptions = {}  # noqa: RUF012 - never changed


CASES: Mapping[str, Case] = {
    "plain": Case(GREEDY),
    "mask": Case(GREEDY, {"action_mask": LOW}),
    "blocked": Case(GREEDY, {"disallowed_tokens": HIGH}),
    "schedule": Case(GREEDY, {"processors": [temperature_schedule(COLD, HOT, WARMUP)]}),
    "both": Case(GREEDY, {"processors": [action_mask(LOW), disallowed_tokens(LOW[:20])]}),
    "penalties": Case(
        msgspec.structs.replace(
            GREEDY,
            repetition_penalty=REPEATED,
            frequency_penalty=FREQUENT,
            presence_penalty=PRESENT,
        )
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    options = gpu_fleet(path, text=True, sampling_backend="flashinfer", grammar_backend="xgrammar")
    async with running(options) as client:
        yield Served(client, load_tiny(path))


def prompt_of(row: int) -> list[int]:
    """One of many lengths, so that rows begin in different steps."""
    return [3 + (7 * row + i) % 500 for i in range(3 + 11 * (row % 7))]


def shaped(name: str, prompt: Sequence[int], rollout: Rollout, logits: Logits) -> Logits:
    """The logits of each place under a case's rules."""
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    allowed[{"mask": LOW, "both": LOW[20:]}.get(name, [*range(VOCAB_SIZE)])] = True
    if name == "blocked":
        allowed[HIGH] = False
    found = logits.masked_fill(~allowed, -torch.inf)
    if name == "schedule":
        warm = (torch.arange(len(found)) / WARMUP).clamp(max=1.0)
        found = found / (COLD + (HOT - COLD) * warm)[:, None]
    if name == "penalties":
        found = punished(found, prompt, rollout.tokens.tolist())
    return found


def punished(logits: Logits, prompt: Sequence[int], tokens: Sequence[int]) -> Logits:
    counts = torch.zeros(len(tokens), VOCAB_SIZE, dtype=torch.int32)
    seen = torch.zeros(len(tokens), VOCAB_SIZE, dtype=torch.bool)
    for place in range(len(tokens)):
        before = torch.tensor(tokens[:place], dtype=torch.int64)
        counts[place] = torch.bincount(before, minlength=VOCAB_SIZE)
        seen[place, [*prompt, *tokens[:place]]] = True
    columns = torch.tensor([[REPEATED, FREQUENT, PRESENT]]).expand(len(tokens), 3)
    return penalised(logits, counts, seen, columns)


def assert_follows(name: str, model: Any, prompt: Sequence[int], rollout: Rollout) -> None:  # noqa: ANN401
    """Every token is the likeliest under its rules, and has the logprob that they give it."""
    assert len(rollout.tokens) == N_TOKENS, name
    expected = shaped(name, prompt, rollout, logits_of(model, prompt, rollout))
    tokens = torch.tensor(rollout.tokens.astype(np.int64))[:, None]
    chosen = expected.gather(1, tokens)[:, 0]
    behind = expected.amax(-1) - chosen
    assert float(behind.max()) < TIED / COLD, (name, int(behind.argmax()), behind.max())
    truth = torch.log_softmax(expected, -1).gather(1, tokens)[:, 0].numpy()
    assert np.abs(truth - rollout.logprobs).mean() < NEAR, name


async def run(client: RolloutClient, prompt: Sequence[int], case: Case) -> Rollout:
    options: GenerateOptions = {**case.options, "deadline_s": DEADLINE_S}
    return await client.generate(prompt, case.sampling, **options)


async def test_rows_of_one_batch_keep_each_its_own_rules(served: Served) -> None:
    names = [[*CASES][row % len(CASES)] for row in range(SLOTS)]
    asked = [run(served.client, prompt_of(row), CASES[name]) for row, name in enumerate(names)]
    rollouts = await asyncio.gather(*asked)
    for row, (name, rollout) in enumerate(zip(names, rollouts, strict=True)):
        assert_follows(name, served.model, prompt_of(row), rollout)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_rules_hold_across_a_pause(served: Served, mode: Any) -> None:  # noqa: ANN401
    streams = {
        name: Streamed(
            served.client,
            prompt_of(row),
            case.sampling,
            **{**case.options, "deadline_s": DEADLINE_S},
        )
        for row, (name, case) in enumerate(CASES.items())
    }
    await served.client.pause(mode)
    await served.client.resume()
    for row, (name, streamed) in enumerate(streams.items()):
        rollout = await streamed.rollout(DEADLINE_S)
        assert streamed.is_contiguous
        assert_follows(name, served.model, prompt_of(row), rollout)


TRUNCATED: Mapping[str, SamplingParams] = {
    "top_k": SamplingParams(max_new_tokens=32, temperature=0.9, top_k=5, ignore_eos=True),
    "top_p": SamplingParams(max_new_tokens=32, temperature=0.9, top_p=0.5, ignore_eos=True),
    "min_p": SamplingParams(max_new_tokens=32, temperature=0.9, min_p=0.2, ignore_eos=True),
    "all": SamplingParams(
        max_new_tokens=32, temperature=1.2, top_k=7, top_p=0.8, min_p=0.05, ignore_eos=True
    ),
    "one": SamplingParams(max_new_tokens=32, temperature=0.7, top_k=1, ignore_eos=True),
    "nothing": SamplingParams(max_new_tokens=32, temperature=0.7, ignore_eos=True),
}
N_KNOWN = 128


@pytest.mark.shows("top_k", "top_p", "min_p")
@pytest.mark.parametrize("beside", ["alone", "all"])
async def test_behaviour_logprobs_are_those_of_what_the_kernels_sampled_from(
    served: Served, beside: str
) -> None:
    """Which kernel draws depends on what the others in the batch ask for."""
    wants: GenerateOptions = {
        "want": Want(logprobs_of=[*range(N_KNOWN)], sampling_mask=True),
        "action_mask": [*range(FIRST_BYTE, N_KNOWN)],
    }
    cases = {name: Case(sampling, wants) for name, sampling in TRUNCATED.items()}
    if beside == "all":
        asked = [run(served.client, [8, 9, 10], case) for case in cases.values()]
        rollouts = await asyncio.gather(*asked)
    else:
        rollouts = [await run(served.client, [8, 9, 10], case) for case in cases.values()]
    for name, rollout in zip(cases, rollouts, strict=True):
        counts = rollout.arrays["sampling_mask_counts"]
        supports = np.split(rollout.arrays["sampling_mask"], np.cumsum(counts)[:-1])
        for place, (token, support) in enumerate(zip(rollout.tokens, supports, strict=True)):
            assert int(token) in support.tolist(), (name, place)
            # Of these ids only can be sampled: their logprobs are the whole distribution.
            known = rollout.arrays["logprobs_of"][place].astype(float)
            mass = np.log(np.exp(known[support]).sum())
            told = float(rollout.behaviour_logprobs[place])
            assert abs(told - (float(rollout.logprobs[place]) - mass)) < 1e-3, (name, place)
    sizes = {
        name: int(rollout.arrays["sampling_mask_counts"].max())
        for name, rollout in zip(cases, rollouts, strict=True)
    }
    print(beside, sizes)
    assert sizes["nothing"] == N_KNOWN - FIRST_BYTE
    assert sizes["top_k"] >= TRUNCATED["top_k"].top_k
    assert max(sizes["top_p"], sizes["min_p"]) < N_KNOWN - FIRST_BYTE


GRAMMARS: Mapping[str, tuple[Grammar, str]] = {
    "regex": (Grammar("regex", "[ab]{4}c[0-9]{6}x"), "[ab]{4}c[0-9]{6}x"),
    "json_schema": (Grammar("json_schema", '{"enum": ["left", "right"]}'), '"(left|right)"'),
    "structural_tag": (
        Grammar(
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "tag", "begin": "<side>", "content": '
            '{"type": "json_schema", "json_schema": {"enum": ["left", "right"]}}, '
            '"end": "</side>"}}',
        ),
        '<side>"(left|right)"</side>',
    ),
}


async def test_grammars_are_kept_to_beside_rows_without_one(served: Served) -> None:
    plain = asyncio.create_task(run(served.client, prompt_of(0), CASES["plain"]))
    sampling = SamplingParams(max_new_tokens=60, temperature=1.0)
    asked = [
        run(served.client, prompt_of(row), Case(sampling, {"grammar": grammar}))
        for row, (grammar, _) in enumerate([*GRAMMARS.values()] * 4)
    ]
    rollouts = await asyncio.gather(*asked)
    for rollout, (_, pattern) in zip(rollouts, [*GRAMMARS.values()] * 4, strict=True):
        assert int(rollout.tokens[-1]) == EOS
        text = cast("Any", byte_tokenizer()).decode(rollout.tokens[:-1].tolist())
        assert re.fullmatch(pattern, text), text
    assert_follows("plain", served.model, prompt_of(0), await plain)
