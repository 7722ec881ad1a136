"""Grammars on the transformers engine: what they allow, who goes on in them, and wrong ones."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    Generate,
    Grammar,
    GrammarKind,
    Prefix,
    Processor,
    SamplingParams,
)
from rolloutbus.engine_worker.engine import Work
from rolloutbus.engine_worker.features import missing
from tests.sglang.models import EOS, FIRST_BYTE, SHAPE, byte_tokenizer, save_model
from tests.step_log import StepLog, key
from tests.tiny_models import TOLERANCE, Build, engines

GRAMMARS: dict[str, tuple[GrammarKind, str, str]] = {
    "regex": ("regex", "[ab]{4}c[0-9]{6}x", "[ab]{4}c[0-9]{6}x"),
    "ebnf": ("ebnf", 'root ::= "yes" | "no"', "yes|no"),
    "schema": ("json_schema", '{"enum": ["left", "right"]}', '"(left|right)"'),
    "tag": (
        "structural_tag",
        """{"type": "structural_tag", "format": {"type": "tag", "begin": "<side>",
        "content": {"type": "json_schema", "json_schema": {"enum": ["left", "right"]}},
        "end": "</side>"}}""",
        '<side>"(left|right)"</side>',
    ),
}
"""Kind, text, and a pattern of what matches it."""
LETTERS = Grammar("regex", "[ab]{8}")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.set_num_threads(1)
    return {"bytes": save_model("llama", root / "bytes"), **_without_end(root)}


def _without_end(root: Path) -> dict[str, Path]:
    """A model without an end-of-sequence token; its vocabulary is `a` and `b`."""
    path = root / "endless"
    shape = {**SHAPE, "vocab_size": 32, "bos_token_id": None, "eos_token_id": None}
    config = cast("Any", transformers.LlamaConfig)(**shape)
    cast("Any", transformers.AutoModelForCausalLM).from_config(config).save_pretrained(path)
    Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?")).save(  # noqa: S106
        str(path / "tokenizer.json")
    )
    return {"endless": path}


@pytest.fixture
def build(log: StepLog, paths: dict[str, Path]) -> Iterator[Build]:
    with engines(log, paths) as build:
        yield build


def work(name: str, grammar: Grammar | None = None, **more: Any) -> Work:  # noqa: ANN401
    """A request whose prompt depends on its name."""
    own = {"prefix", "processors"}
    options = {each: more.pop(each) for each in own & more.keys()}
    sampling = {"max_new_tokens": 40, "sampling_seed": 3, **more}
    prompt = np.frombuffer(name.encode(), np.uint8).astype(np.int32) % 29 + 3
    return Work(key(name), prompt, SamplingParams(**sampling), grammar=grammar, **options)


def text_of(tokens: Sequence[int]) -> str:
    return cast("Any", byte_tokenizer()).decode(list(tokens))


def problems_of(log: StepLog) -> list[tuple[str, Problem]]:
    return [(step.keys[row][0], problem) for step in log.steps for row, problem in step.problems]


def wait_problem(log: StepLog) -> tuple[str, Problem]:
    log.wait_until(lambda: bool(problems_of(log)))
    [found] = problems_of(log)
    return found


@pytest.mark.shows("json_schema", "regex", "ebnf", "structural_tag")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_kind_is_kept_to_beside_rows_of_other_kinds_and_of_none(
    build: Build, log: StepLog, temperature: float
) -> None:
    engine = build("bytes", max_context=256)
    jobs = [
        work(f"{name}-{i}", Grammar(kind, text), temperature=temperature, sampling_seed=i)
        for name, (kind, text, _) in GRAMMARS.items()
        for i in range(3)
    ]
    free = work("free", temperature=temperature, ignore_eos=True)
    engine.generate([Work(key("alone"), free.prompt, free.sampling)])
    log.wait_finished("alone")

    engine.generate([*jobs, free])

    log.wait_finished("free", *(job.key[0] for job in jobs))
    for name, (_, _, pattern) in GRAMMARS.items():
        for i in range(3):
            emitted = log[f"{name}-{i}"]
            assert emitted.finishes == ["stop"]
            assert emitted.tokens[-1] == EOS
            assert re.fullmatch(pattern, text_of(emitted.tokens[:-1]))
    assert log["free"].tokens == log["alone"].tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_those_of_what_the_grammar_allows(
    build: Build, log: StepLog, paths: dict[str, Path], temperature: float
) -> None:
    asked = work("asked", LETTERS, temperature=temperature)
    build("bytes", max_context=256).generate([asked])
    log.wait_finished("asked")
    emitted = log["asked"]
    assert len(emitted.tokens) == 9

    models = cast("Any", transformers.AutoModelForCausalLM)
    model = models.from_pretrained(paths["bytes"], dtype=torch.float32).eval()
    known = [*asked.prompt.tolist(), *emitted.tokens]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([known])).logits[0].float() / (temperature or 1.0)
    letters = [FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")]
    for i, token in enumerate(emitted.tokens[:-1]):
        allowed = torch.log_softmax(logits[len(asked.prompt) + i - 1][letters], -1)
        true = float(allowed[letters.index(token)])
        assert emitted.logprobs[i] == pytest.approx(true, abs=TOLERANCE)
    assert emitted.logprobs[-1] == 0.0, "nothing but the end was allowed"


def resumed(job: Work, name: str, log: StepLog, n_kept: int) -> Work:
    """The same request, as another worker goes on with it after `n_kept` tokens."""
    first = log[job.key[0]]
    tokens = np.array(first.tokens[:n_kept], np.int32).tobytes()
    logprobs = np.array(first.logprobs[:n_kept], np.float32).tobytes()
    prefix = Prefix(tokens, logprobs, [(0, n_kept)], logprobs)
    return Work(
        key(name),
        job.prompt,
        job.sampling,
        prefix=prefix,
        grammar=job.grammar,
        processors=job.processors,
    )


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_resumed_request_goes_on_in_its_grammar(build: Build, log: StepLog, kind: str) -> None:
    engine = build("bytes", max_context=256)
    grammar = Grammar(GRAMMARS[kind][0], GRAMMARS[kind][1])
    whole = work("whole", grammar, frequency_penalty=1.0, repetition_penalty=1.3)
    engine.generate([whole])
    log.wait_finished("whole")
    n = len(log["whole"].tokens)

    kept = sorted({0, 1, n // 2, n - 1, n})
    engine.generate([resumed(whole, f"after {k}", log, k) for k in kept])

    log.wait_finished(*(f"after {k}" for k in kept))
    for k in kept:
        assert log["whole"].tokens[k:] == log[f"after {k}"].tokens
        assert log[f"after {k}"].finishes == ["stop"]
        rest = log["whole"].logprobs[k:]
        assert log[f"after {k}"].logprobs == pytest.approx(rest, abs=TOLERANCE)


def test_a_request_that_was_put_back_goes_on_in_its_grammar(build: Build, log: StepLog) -> None:
    engine = build("bytes", max_context=256)
    log.hold(4)
    engine.generate([work("put back", LETTERS)])
    log.call_midway(engine, lambda: engine.pause("retract")).result()
    engine.resume()
    log.wait_finished("put back")
    assert re.fullmatch(LETTERS.text, text_of(log["put back"].tokens[:-1]))


def test_a_prefix_that_is_not_of_the_grammar_is_refused(build: Build, log: StepLog) -> None:
    engine = build("bytes", max_context=256)
    engine.generate([work("digits", Grammar("regex", "[0-9]{5}"))])
    log.wait_finished("digits")
    engine.generate([resumed(work("digits", LETTERS), "letters", log, 2)])
    name, problem = wait_problem(log)
    assert (name, problem.code, problem.field) == ("letters", "bad_request", "prefix.tokens")
    assert problem.outcome == "not_started"


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type": ', "line 1"),
        ("json_schema", '{"type": "objekt"}', 'Unsupported type "objekt"'),
        ("json_schema", '{"$ref": "#/$defs/nowhere"}', "$defs"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "nested more than 128"),
        ("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000, "nested more than 128"),
        ("regex", "((", "not closed"),
        ("regex", "(?=a)b", "Lookahead"),
        ("ebnf", "root ::= a", 'Rule "a" is not defined'),
        ("structural_tag", '{"structures": [{}], "triggers": ["<"]}', "'begin' is missing"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "z"}}', "recognized: z"),
    ],
)
def test_a_grammar_that_is_none_ends_its_request_before_it_runs(
    build: Build, log: StepLog, kind: GrammarKind, text: str, says: str
) -> None:
    build("bytes", max_context=256).generate(
        [work("bad", Grammar(kind, text)), work("good", LETTERS)]
    )
    log.wait_finished("good")
    name, problem = wait_problem(log)
    assert (name, problem.code, problem.field) == ("bad", "bad_request", "grammar.text")
    assert problem.outcome == "not_started"
    assert says in problem.message
    assert ".cc" not in problem.message
    assert log["bad"].tokens == []


def test_an_older_structural_tag_is_free_text_with_schemas_after_its_triggers(
    build: Build, log: StepLog
) -> None:
    text = '{"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}],'
    grammar = Grammar("structural_tag", text + '"triggers": ["<f>"]}')
    bias = {FIRST_BYTE + byte: 100.0 for byte in b"<f>"}
    # Only these letters are ever likely: sooner or later they spell the trigger.
    build("bytes", max_context=256).generate(
        [work("tagged", grammar, max_new_tokens=200, logit_bias=bias)]
    )
    log.wait_finished("tagged")
    assert "<f>1</f>" in text_of(log["tagged"].tokens)


def test_a_processor_brings_nothing_back_that_the_grammar_rules_out(
    build: Build, log: StepLog
) -> None:
    soft = Processor("action_mask", {"allowed": [FIRST_BYTE + ord("b")], "mask_value": 50.0})
    build("bytes", max_context=256).generate(
        [work("soft", LETTERS, processors=[soft], temperature=0.0)]
    )
    log.wait_finished("soft")
    assert text_of(log["soft"].tokens[:-1]) == "aaaaaaaa"


def test_rules_that_leave_nothing_of_the_grammar_end_their_request_alone(
    build: Build, log: StepLog
) -> None:
    mask = Processor("action_mask", {"allowed": [7]})
    build("bytes", max_context=256).generate(
        [work("nothing", LETTERS, processors=[mask]), work("good", LETTERS)]
    )
    log.wait_finished("good")
    name, problem = wait_problem(log)
    assert (name, problem.code, problem.field) == ("nothing", "bad_request", "processors")


def test_the_end_of_a_grammar_is_the_end_also_with_ignore_eos(build: Build, log: StepLog) -> None:
    build("bytes", max_context=256).generate(
        [work("on", LETTERS, ignore_eos=True), work("short", LETTERS, max_new_tokens=3)]
    )
    log.wait_finished("on", "short")
    assert (log["on"].finishes, log["on"].tokens[-1]) == (["stop"], EOS)
    assert (log["short"].finishes, len(log["short"].tokens)) == (["length"], 3)


def test_without_an_end_of_sequence_token_a_grammar_ends_where_nothing_can_follow(
    build: Build, log: StepLog
) -> None:
    jobs = [work("fixed", Grammar("regex", "[ab]{3}")), work("open", Grammar("regex", "[ab]+"))]
    build("endless", max_context=256).generate(jobs)
    log.wait_finished("fixed", "open")
    assert (log["fixed"].finishes, len(log["fixed"].tokens)) == (["stop"], 3)
    assert (log["open"].finishes, len(log["open"].tokens)) == (["length"], 40)
    assert {*log["fixed"].tokens, *log["open"].tokens} <= {1, 2}


def test_a_grammar_that_no_token_can_spell_ends_its_request_alone(
    build: Build, log: StepLog
) -> None:
    jobs = [work("spells c", Grammar("regex", "ac")), work("good", Grammar("regex", "[ab]{9}"))]
    build("endless", max_context=256).generate(jobs)
    log.wait_finished("good")
    name, problem = wait_problem(log)
    assert (name, problem.code, problem.field) == ("spells c", "bad_request", "grammar.text")
    assert log["spells c"].tokens == [1]


def test_a_grammar_that_would_hold_all_others_up_is_given_up(build: Build, log: StepLog) -> None:
    ambiguous = Grammar("regex", "((a{1,1000}){1,1000}){1,1000}b")
    bias = {FIRST_BYTE + ord("a"): 100.0}
    jobs = [work("slow", ambiguous, logit_bias=bias, max_new_tokens=200), work("good", LETTERS)]
    build("bytes", max_context=256).generate(jobs)
    log.wait_finished("good")
    name, problem = wait_problem(log)
    assert (name, problem.code, problem.field) == ("slow", "bad_request", "grammar.text")
    assert "too ambiguous" in problem.message


def test_an_aborted_request_whose_grammar_is_being_made_ends_once(
    build: Build, log: StepLog
) -> None:
    engine = build("bytes", max_context=256)
    slow = Grammar("regex", "[a-z]{1,60000}")
    engine.generate([work("aborted", slow)])
    assert engine.abort([key("aborted")]) == 1
    log.wait_finished("aborted")
    engine.generate([work("later", LETTERS)])
    log.wait_finished("later")
    assert log["aborted"].finishes == ["abort"]
    assert engine.stats().n_running == engine.stats().n_waiting == 0


def test_without_its_package_a_grammar_is_refused_with_what_to_install(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    facts = build("bytes", max_context=256).facts
    asked = Generate(bytes(4), SamplingParams(), grammar=LETTERS)
    problem = missing(asked, facts.features, facts.lost)
    assert problem is not None
    assert (problem.code, problem.field) == ("unsupported", "grammar")
    assert "pip install 'rolloutbus[grammar]'" in problem.message
