"""What a `generate` may ask for beside its tokens, and which field a refusal names."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.generation import (
    Generate,
    Grammar,
    Media,
    Prefix,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.bus.wire.validation import adapter_of, check_generate

VOCAB_SIZE = 100
PLAIN = Generate(np.array([1, 2, 3], "<i4").tobytes(), SamplingParams(max_new_tokens=8))
PREFIX = Prefix(np.array([4], "<i4").tobytes(), bytes(4), [(1, 1)])

POSSIBLE: list[dict[str, Any]] = [
    {"sampling": SamplingParams(8, stop=["x" * 256] * 32, stop_regex=["[.!?]$"])},
    {"sampling": SamplingParams(8, logit_bias={0: -100.0, VOCAB_SIZE - 1: 1e9})},
    {"want": Want(top_logprobs=64, logprobs_of=[0, 99] * 64)},
    {"want": Want(prompt_logprobs=True, prompt_logprobs_start=2)},
    {"want": Want(hidden_states="full", routed_experts=True, sampling_mask=True)},
    {"lora": "judge"},
    {"lora": "A" * 40 + "@18446744073709551615"},
    {"lora": "judge@5", "prefix": PREFIX},
    {"grammar": Grammar("regex", "é" * (32 * 1024))},
    {"processors": [Processor("mask", {"ids": [1, 2], "value": -math.inf})] * 8},
    {"media": [Media("image", b"x")] * 64},
    {"media": [Media("audio", bytes(MAX_PIECE_BYTES))]},
]

IMPOSSIBLE: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling": SamplingParams(8, stop=["x"] * 33)}, "sampling.stop", "at most 32"),
    ({"sampling": SamplingParams(8, stop=["x" * 257])}, "sampling.stop", "1 to 256"),
    ({"sampling": SamplingParams(8, stop_regex=[""])}, "sampling.stop_regex", "1 to 256"),
    ({"sampling": SamplingParams(8, logit_bias={100: 1.0})}, "sampling.logit_bias", "0 to 99"),
    ({"sampling": SamplingParams(8, logit_bias={-1: 1.0})}, "sampling.logit_bias", "0 to 99"),
    ({"sampling": SamplingParams(8, logit_bias={1: math.nan})}, "sampling.logit_bias", "to 1e+09"),
    ({"sampling": SamplingParams(8, logit_bias={1: -2e9})}, "sampling.logit_bias", "from -1e+09"),
    (
        {"sampling": SamplingParams(8, logit_bias=dict.fromkeys(range(1025), 0.0))},
        "sampling.logit_bias",
        "at most 1024",
    ),
    ({"want": Want(top_logprobs=65)}, "want.top_logprobs", "0 to 64"),
    ({"want": Want(top_logprobs=-1)}, "want.top_logprobs", "0 to 64"),
    ({"want": Want(logprobs_of=[1] * 129)}, "want.logprobs_of", "at most 128"),
    ({"want": Want(logprobs_of=[100])}, "want.logprobs_of", "0 to 99"),
    (
        {"want": Want(prompt_logprobs=True, prompt_logprobs_start=3)},
        "want.prompt_logprobs_start",
        "3 tokens",
    ),
    ({"want": Want(prompt_logprobs_start=1)}, "want.prompt_logprobs_start", "not asked for"),
    ({"lora": "judge@"}, "lora", "NAME@VERSION"),
    ({"lora": "judge@01"}, "lora", "NAME@VERSION"),
    ({"lora": "../judge"}, "lora", "NAME@VERSION"),
    ({"lora": "A" * 41}, "lora", "1 to 40"),
    ({"lora": "judge", "prefix": PREFIX}, "lora", "NAME@VERSION"),
    ({"grammar": Grammar("ebnf", "")}, "grammar.text", "1 to 65536"),
    ({"grammar": Grammar("ebnf", "é" * 32769)}, "grammar.text", "1 to 65536"),
    ({"processors": [Processor("p")] * 9}, "processors", "at most 8"),
    ({"processors": [Processor("")]}, "processors.name", "1 to 64"),
    (
        {"processors": [Processor("p", {str(n): n for n in range(17)})]},
        "processors.params",
        "at most 16",
    ),
    ({"media": [Media("image", b"x")] * 65}, "media", "at most 64"),
    ({"media": [Media("video", b"")]}, "media.data", "1 to"),
    ({"media": [Media("video", bytes(MAX_PIECE_BYTES + 1))]}, "media.data", str(MAX_PIECE_BYTES)),
]


@pytest.mark.parametrize("wish", POSSIBLE)
def test_a_wish_within_its_limits_passes(wish: dict[str, Any]) -> None:
    body = msgspec.structs.replace(PLAIN, **wish)
    assert check_generate(body, vocab_size=VOCAB_SIZE, max_context=64) is None


@pytest.mark.parametrize(("wish", "field", "limit"), IMPOSSIBLE)
def test_a_wish_beyond_a_limit_is_refused_with_field_and_limit(
    wish: dict[str, Any], field: str, limit: str
) -> None:
    body = msgspec.structs.replace(PLAIN, **wish)
    problem = check_generate(body, vocab_size=VOCAB_SIZE, max_context=64)
    assert problem is not None
    assert (problem.code, problem.outcome, problem.field) == ("bad_request", "not_started", field)
    assert limit in problem.message


def test_the_parts_of_an_adapters_name_are_told_apart() -> None:
    assert adapter_of("judge") == ("judge", None)
    assert adapter_of("judge@0") == ("judge", 0)
    assert adapter_of("judge@17") == ("judge", 17)
    assert adapter_of("judge@x") is None
