"""Stop texts and patterns on the transformers engine."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rolloutbus.bus.cut_characters import CUT
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generate, Prefix, SamplingParams
from rolloutbus.engine_worker.engine import Work
from rolloutbus.engine_worker.engines.shared.texts import LOOK_BACK_CHARS, StopTexts
from rolloutbus.engine_worker.features import missing
from tests.sglang.models import byte_tokenizer, save_model
from tests.step_log import StepLog, key
from tests.tiny_models import Build, engines, save_models

PROMPT = np.array([70, 71, 72], np.int32)
NEVER_DONE = "(a|aa)+[b-z]"


def decode(tokens: Sequence[int]) -> str:
    return cast("Any", byte_tokenizer()).decode(list(tokens))


def encode(text: str) -> list[int]:
    return cast("Any", byte_tokenizer()).encode(text, add_special_tokens=False)


def ends_at(stops: StopTexts, tokens: Sequence[int]) -> int | None:
    """Tokens after which it stops, as an engine asks: after each one."""
    asked = range(1, len(tokens) + 1)
    return next((n for n in asked if stops(tokens[:n]) is True), None)


@pytest.mark.shows("stop", "stop_regex")
@pytest.mark.parametrize(
    ("texts", "patterns", "said"),
    [
        (["cd"], [], "abcd"),
        (["é"], [], "abcdé"),
        ([], ["c.*f"], "abcdéf"),
        ([], ["^b"], None),
        ([], ["^a"], "a"),
        ([], ["é"], "abcdé"),
        (["zz"], ["x", "b+"], "ab"),
        ([], ["x{2}"], None),
    ],
)
def test_an_output_stops_with_the_token_that_completes_a_text_or_a_pattern(
    texts: list[str], patterns: list[str], said: str | None
) -> None:
    found = ends_at(StopTexts(decode, texts, patterns), encode("abcdéfg"))
    assert found == (None if said is None else len(encode(said)))


@pytest.mark.parametrize(
    ("texts", "patterns", "least", "said"),
    [
        (["cd"], [], 3, "cdcd"),
        (["cd"], [], 1, "cd"),
        (["é"], [], 5, "cdcdé"),  # half of it is among the first five
        (["é"], [], 6, None),
        (["cd", "cdc"], [], 3, "cdcd"),
        ([], ["c."], 3, "cdcd"),
        ([], ["c.*"], 3, "cdcd"),
        ([], ["c.*?d"], 2, "cdcd"),
        ([], ["^cd"], 2, None),
        ([], ["é"], 5, "cdcdé"),
        ([], ["é"], 6, None),
    ],
)
def test_what_ends_within_the_least_number_of_tokens_is_none(
    texts: list[str], patterns: list[str], least: int, said: str | None
) -> None:
    stops = StopTexts(decode, texts, patterns, min_new_tokens=least)
    found = ends_at(stops, encode("cdcdé" + "g" * 40))
    assert found == (None if said is None else len(encode(said)))


def test_a_match_may_begin_within_one_that_is_none() -> None:
    stops = StopTexts(decode, [], ["cc|cd"], min_new_tokens=2)
    assert ends_at(stops, encode("ccdg")) == 3


@pytest.mark.parametrize(("n_between", "counts"), [(100, True), (2 * LOOK_BACK_CHARS, False)])
def test_a_match_begins_in_the_last_characters_of_the_least_number_of_tokens(
    n_between: int, *, counts: bool
) -> None:
    said = "c" + "g" * n_between
    stops = StopTexts(decode, [], ["cg*d"], min_new_tokens=len(said))
    assert ends_at(stops, encode(said + "ddd")) == (len(said) + 1 if counts else None)


def decode_as_runs(tokens: Sequence[int]) -> str:
    """As sentencepiece does: a run of bytes that is cut at its end is one of unknown characters."""
    raw = bytes(tokens)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return CUT * len(raw)


def test_a_cut_character_leaves_those_before_it_within_the_least_number_of_tokens() -> None:
    stops = StopTexts(decode_as_runs, ["é"], [], min_new_tokens=5)
    assert ends_at(stops, list("éééa".encode())) == 6


CALLS = [
    "(?R)",
    "(a?(?-1))",
    "(?x)(?R )",
    "(a?(?1))",
    "(?P<x>a*(?&x))",
    "(?P<x>a*(?P>x))",
    r"\\(?0)",
    "(?#[)(a?(?1))(?#])",
    r"\[(a?(?1))\]",
    "[^]](a?(?1))[]]",
    "(?x)(a?(?1)) # [\n # ]",
    "(?x)# [\n(a?(?1))# ]",
    "(?V1)[[a]](a?(?1))",
    r"(?#\)[)(a?(?1))(?#])",
]
"""They take seconds, whatever limit is set."""


@pytest.mark.parametrize("pattern", ["((", "a{2,1}", "*a", *CALLS])
def test_a_pattern_that_is_none_is_named(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        StopTexts(decode, [], [pattern])


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"a\(?1", r"(a)(?(1)b)", "(?P<R>a)(?P=R)?"),
        *("a[(?1]?", "a[](?R)]?", "a[^](?R)]?", r"a[\](?1]?", "a(?#(?R)"),
    ],
)
def test_what_only_looks_like_a_call_is_a_pattern(pattern: str) -> None:
    assert StopTexts(decode, [], [pattern])(encode("aab a1")) is True


@pytest.mark.parametrize("least", [0, 9])
def test_a_pattern_that_backtracks_without_end_is_given_up(least: int) -> None:
    found = StopTexts(decode, [], [NEVER_DONE], min_new_tokens=least)(encode("a" * 60))
    assert isinstance(found, Problem)
    assert (found.code, found.field) == ("bad_request", "sampling.stop_regex")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.set_num_threads(1)
    return {**save_models(root), "bytes": save_model("llama", root / "bytes")}


@pytest.fixture
def build(log: StepLog, paths: dict[str, Path]) -> Iterator[Build]:
    with engines(log, paths) as build:
        yield build


def work(name: str, prefix: Prefix | None = None, **sampling: Any) -> Work:  # noqa: ANN401
    asked = SamplingParams(**{"max_new_tokens": 60, "temperature": 0.0, **sampling})
    return Work(key(name), PROMPT, asked, prefix)


def test_a_pattern_ends_a_request_where_its_text_would_also_after_a_resume(
    build: Build, log: StepLog
) -> None:
    engine = build("bytes", max_context=256)
    engine.generate([work("free", ignore_eos=True)])
    log.wait_finished("free")
    free = log["free"].tokens
    pairs = (decode(free[i : i + 2]) for i in range(2, len(free)))
    text = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
    engine.generate([work("text", stop=[text]), work("pattern", stop_regex=[re.escape(text)])])
    log.wait_finished("text", "pattern")
    told = log["pattern"]
    assert (told.tokens, told.finishes) == (log["text"].tokens, ["stop"])
    assert text in decode(told.tokens)
    assert text not in decode(told.tokens[:-1])

    n = len(told.tokens)
    for k in (1, n - 1, n):
        tokens = np.array(told.tokens[:k], np.int32).tobytes()
        logprobs = np.array(told.logprobs[:k], np.float32).tobytes()
        prefix = Prefix(tokens, logprobs, [(0, k)])
        engine.generate([work(f"after {k}", prefix, stop_regex=[re.escape(text)])])
        log.wait_finished(f"after {k}")
        assert log[f"after {k}"].tokens == told.tokens[k:]
        assert log[f"after {k}"].finishes == ["stop"]


def test_patterns_that_cannot_be_looked_for_end_their_requests_alone(
    build: Build, log: StepLog
) -> None:
    engine = build("bytes", max_context=256)
    many = {encode("a")[0]: 100.0}
    engine.generate(
        [
            work("none", stop_regex=["(("]),
            work("slow", stop_regex=[NEVER_DONE], logit_bias=many),
            work("good", ignore_eos=True),
        ]
    )
    log.wait_finished("good")
    log.wait_until(lambda: sum(len(step.problems) for step in log.steps) == 2)
    problems = {step.keys[row][0]: told for step in log.steps for row, told in step.problems}
    assert problems.keys() == {"none", "slow"}
    assert {told.field for told in problems.values()} == {"sampling.stop_regex"}
    assert problems[key("none")[0]].outcome == "not_started"
    assert len(log["good"].tokens) == 60
    assert engine.stats().n_running == engine.stats().n_waiting == 0


@pytest.mark.parametrize("name", ["stop", "stop_regex"])
def test_a_model_without_a_tokenizer_refuses_texts_and_says_what_is_missing(
    build: Build, name: str
) -> None:
    facts = build("llama").facts
    body = Generate(bytes(4), SamplingParams(**{name: ["x"]}))
    problem = missing(body, facts.features, facts.lost)
    assert problem is not None
    assert (problem.code, problem.field) == ("unsupported", f"sampling.{name}")
    assert "no tokenizer.json" in problem.message
