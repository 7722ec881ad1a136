"""How a piece of work is put to SGLang: types, units, and what it is not told at all."""

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rolloutbus.bus.wire.messages.generation import (
    Grammar,
    Media,
    Prefix,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.engine_worker.engine import EngineFacts, Work
from rolloutbus.engine_worker.engines.sglang.requests import (
    RequestTerms,
    Unfit,
    end_of_kept,
    generate_request,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import NO_RULES, Rules, rules_in
from rolloutbus.engine_worker.engines.shared.processors import Processors
from tests.step_log import key

VOCAB = 100
FACTS = EngineFacts("sglang", VOCAB, 1000, 8, (2,))
TERMS = RequestTerms(FACTS, Processors({}), random.Random(0))


def asked(work: Work, terms: RequestTerms = TERMS) -> dict[str, Any]:
    """The fields of SGLang's request."""

    found: dict[str, Any] = {}

    def make(kind: str, **fields: object) -> None:
        assert kind == "GenerateReqInput"
        found.update(fields)

    generate_request(work, "s1.", make, terms)
    return found


def work(
    sampling: SamplingParams | None = None,
    kept: tuple[int, ...] = (),
    body: Mapping[str, Any] | None = None,
) -> Work:
    raw = struct.pack(f"<{len(kept)}i", *kept)
    prefix = Prefix(raw, raw, [(0, len(kept))]) if kept else None
    prompt = np.array([5, 6, 7], np.int32)
    return Work(key("a"), prompt, sampling or SamplingParams(), prefix, **(body or {}))


def params(sampling: SamplingParams, terms: RequestTerms = TERMS) -> dict[str, Any]:
    found: dict[str, Any] = asked(work(sampling), terms)["sampling_params"]
    return found


def test_numbers_are_of_the_types_that_sglang_takes() -> None:
    loose = SamplingParams(
        temperature=1, top_p=1, min_p=0, top_k=5, logit_bias={3: 1}, stop_token_ids=[4]
    )
    found = params(loose)
    assert all(type(found[name]) is float for name in ("temperature", "top_p", "min_p"))
    assert type(found["top_k"]) is int
    assert found["logit_bias"] == {"3": 1.0}
    assert type(found["logit_bias"]["3"]) is float
    assert found["stop_token_ids"] == [4]


def test_a_top_k_that_cuts_nothing_is_off() -> None:
    assert [params(SamplingParams(top_k=k))["top_k"] for k in (0, VOCAB, 2**40)] == [-1, -1, -1]
    assert params(SamplingParams(top_k=VOCAB - 1))["top_k"] == VOCAB - 1


def test_the_likeliest_token_with_a_temperature_is_not_asked_for_as_greedy() -> None:
    warm, cold = params(SamplingParams(top_k=1)), params(SamplingParams(top_k=1, temperature=0.0))
    assert warm["top_k"] == -1
    assert 0 < warm["top_p"] < 1e-6
    assert (cold["top_k"], cold["top_p"]) == (1, 1.0)


def test_what_sglang_gets_wrong_is_left_to_our_rules() -> None:
    sampling = SamplingParams(
        repetition_penalty=3.0, frequency_penalty=1, presence_penalty=-1, min_new_tokens=4
    )
    found = asked(work(sampling, kept=(8, 9)))
    told = found["sampling_params"]
    assert not {name for name in told if "penalty" in name or name.startswith("min_new")}
    rules = rules_in(told["custom_params"])
    assert rules.n_kept == 2
    assert (rules.penalties.repetition, rules.penalties.frequency) == (3.0, 1.0)
    assert (rules.min_new_tokens, rules.end_ids) == (4, (2,))
    assert "custom_logit_processor" in found


def test_end_of_sequence_may_be_sampled_early_where_it_ends_nothing() -> None:
    sampling = SamplingParams(min_new_tokens=4, ignore_eos=True, stop_token_ids=[30])
    assert rules_in(params(sampling)["custom_params"]).end_ids == (30,)


def test_a_plain_request_costs_nothing_more() -> None:
    found = asked(work())
    assert "custom_logit_processor" not in found
    assert "custom_params" not in found["sampling_params"]
    assert found["logprob_start_len"] == -1


def test_kept_tokens_are_input_and_count_towards_the_limit() -> None:
    found = asked(work(SamplingParams(max_new_tokens=10), kept=(8, 9)))
    assert found["input_ids"] == [5, 6, 7, 8, 9]
    assert found["sampling_params"]["max_new_tokens"] == 8


def test_processors_travel_as_the_path_of_their_factory_and_numbers() -> None:
    mask = Processor("action_mask", {"allowed": [1, 2], "mask_value": float("-inf")})
    rules = rules_in(asked(work(body={"processors": [mask]}))["sampling_params"]["custom_params"])
    ((path, told),) = rules.processors
    assert path == "rolloutbus.engine_worker.engines.shared.processors:action_mask"
    assert told == mask.params


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"processors": [Processor("action_mask", {"allowed": [VOCAB]})]}, "processors"),
        ({"processors": [Processor("unheard_of")]}, "processors"),
        ({"sampling": SamplingParams(stop_regex=["("])}, "sampling.stop_regex"),
    ],
)
def test_what_cannot_be_run_is_said_before_sglang_sees_it(
    body: Mapping[str, Any], field: str
) -> None:
    bad = work(body.get("sampling"), body={k: v for k, v in body.items() if k != "sampling"})
    with pytest.raises(Unfit) as caught:
        asked(bad)
    assert caught.value.problem.field == field
    assert caught.value.problem.code == "bad_request"


@pytest.mark.parametrize(
    ("kept", "end"),
    [((), None), ((8,), None), ((8, 2), "stop"), ((8, 30), "stop"), ((2, 8, 9), "length")],
)
def test_what_earlier_attempts_left_may_be_all_of_a_request(
    kept: tuple[int, ...], end: str | None
) -> None:
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=[30])
    assert end_of_kept(work(sampling, kept), FACTS) == end


def test_an_ending_token_among_the_least_number_ends_nothing() -> None:
    sampling = SamplingParams(max_new_tokens=5, min_new_tokens=2)
    assert end_of_kept(work(sampling, (8, 2)), FACTS) is None
    assert end_of_kept(work(sampling, (8, 9, 2)), FACTS) == "stop"


def test_stop_texts_are_left_to_our_rules() -> None:
    found = params(SamplingParams(stop=["x"], stop_regex=["y+"]))
    assert not found.keys() & {"stop", "stop_regex"}
    rules = rules_in(found["custom_params"])
    assert (rules.stop, rules.stop_regex) == (("x",), ("y+",))


@pytest.mark.parametrize(("start", "told"), [(0, 0), (1, 0), (2, 1)])
def test_prompt_logprobs_are_asked_for_from_one_token_earlier(start: int, told: int) -> None:
    want = Want(prompt_logprobs=True, prompt_logprobs_start=start, logprobs_of=[4])
    assert asked(work(body={"want": want}))["logprob_start_len"] == told


def test_each_request_has_a_seed_of_its_own_where_seeds_count() -> None:
    terms = RequestTerms(FACTS, Processors({}), random.Random(1), has_seeds=True)
    seeds = [params(SamplingParams(), terms)["sampling_seed"] for _ in range(3)]
    assert len({*seeds}) == 3
    assert params(SamplingParams(sampling_seed=-5), terms)["sampling_seed"] == -5
    assert "sampling_seed" not in params(SamplingParams(sampling_seed=7))


def test_media_are_bytes_whatever_their_content_says() -> None:
    media = [Media("image", b"file:///etc/passwd"), Media("audio", b"http://there/x.wav")]
    found = asked(work(body={"media": media}))
    assert found["image_data"] == [b"file:///etc/passwd"]
    assert found["audio_data"] == [b"http://there/x.wav"]
    assert all(type(each) is bytes for each in (*found["image_data"], *found["audio_data"]))


def test_a_grammar_is_text_under_its_own_name() -> None:
    grammar = Grammar("json_schema", '{"type": "object"}')
    told = asked(work(body={"grammar": grammar}))["sampling_params"]
    assert told["json_schema"] == grammar.text
    assert not {"regex", "ebnf", "structural_tag"} & told.keys()


def test_priority_and_session_are_told_only_where_they_mean_something() -> None:
    body = {"priority": 7, "session": "s"}
    assert not {"priority", "session_id"} & asked(work(body=body)).keys()
    terms = RequestTerms(
        FACTS, Processors({}), random.Random(), has_priorities=True, has_sessions=True
    )
    found = asked(work(body=body), terms)
    assert (found["priority"], found["session_id"]) == (7, "s")


def test_rules_survive_the_way_into_the_scheduler() -> None:
    assert rules_in(None) == rules_in({}) == rules_in({"else": 1}) == NO_RULES == Rules()
