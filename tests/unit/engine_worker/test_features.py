"""What a request asks of an engine beyond the ordinary, and what is said if it cannot have it."""

from typing import Any

import msgspec
import pytest

from rolloutbus.bus.wire.messages.generation import (
    Generate,
    Grammar,
    Media,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.engine_worker.features import missing, needs, unknown_adapter

PLAIN = Generate(b"\x01\x00\x00\x00", SamplingParams(top_k=4, stop_token_ids=[3], ignore_eos=True))

NEEDS: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling": SamplingParams(sampling_seed=0)}, "seed", "sampling.sampling_seed"),
    ({"sampling": SamplingParams(min_new_tokens=1)}, "min_new_tokens", "sampling.min_new_tokens"),
    ({"sampling": SamplingParams(stop=["x"])}, "stop", "sampling.stop"),
    ({"sampling": SamplingParams(stop_regex=["x"])}, "stop_regex", "sampling.stop_regex"),
    ({"sampling": SamplingParams(logit_bias={1: 1.0})}, "logit_bias", "sampling.logit_bias"),
    ({"want": Want(top_logprobs=1)}, "top_logprobs", "want.top_logprobs"),
    ({"want": Want(logprobs_of=[1])}, "logprobs_of", "want.logprobs_of"),
    ({"want": Want(prompt_logprobs=True)}, "prompt_logprobs", "want.prompt_logprobs"),
    ({"want": Want(hidden_states="last")}, "hidden_states_last", "want.hidden_states"),
    ({"want": Want(hidden_states="full")}, "hidden_states_full", "want.hidden_states"),
    ({"want": Want(routed_experts=True)}, "routed_experts", "want.routed_experts"),
    ({"want": Want(sampling_mask=True)}, "sampling_mask", "want.sampling_mask"),
    ({"want": Want(cached_tokens=True)}, "cached_tokens", "want.cached_tokens"),
    ({"grammar": Grammar("json_schema", "{}")}, "json_schema", "grammar"),
    ({"grammar": Grammar("structural_tag", "{}")}, "structural_tag", "grammar"),
    ({"processors": [Processor("mask")]}, "processor:mask", "processors"),
    ({"media": [Media("video", b"x")]}, "video", "media"),
    ({"lora": "judge"}, "lora", "lora"),
]


def test_a_plain_request_needs_nothing() -> None:
    assert list(needs(PLAIN)) == []
    assert list(needs(msgspec.structs.replace(PLAIN, want=Want()))) == []


def test_a_seed_means_nothing_to_the_greedy() -> None:
    greedy = msgspec.structs.replace(PLAIN, sampling=SamplingParams(temperature=0, sampling_seed=3))
    assert list(needs(greedy)) == []


@pytest.mark.parametrize(("wish", "feature", "field"), NEEDS)
def test_each_wish_needs_its_feature(wish: dict[str, Any], feature: str, field: str) -> None:
    body = msgspec.structs.replace(PLAIN, **wish)
    everything = {each for _, each, _ in NEEDS}
    assert list(needs(body)) == [(feature, field)]
    assert missing(body, everything) is None
    problem = missing(body, everything - {feature})
    assert problem is not None
    assert (problem.code, problem.outcome, problem.field) == ("unsupported", "not_started", field)
    assert feature in problem.message


def test_the_refusal_says_which_option_would_help() -> None:
    states = msgspec.structs.replace(PLAIN, want=Want(hidden_states="full"))
    problem = missing(states, frozenset())
    assert problem is not None
    assert "return_hidden_states_mode" in problem.message


@pytest.mark.parametrize(("wish", "feature", "field"), NEEDS)
def test_the_refusal_says_what_is_installed_without_it(
    wish: dict[str, Any], feature: str, field: str
) -> None:
    body = msgspec.structs.replace(PLAIN, **wish)
    lost = "processor:*" if feature.startswith("processor:") else feature
    what = f"sglang 9.9.9 cannot carry it: there is no {field}_function"
    problem = missing(body, frozenset(), {lost: what, "another": "something else"})
    assert problem is not None
    assert (problem.code, problem.field) == ("unsupported", field)
    assert problem.message == f"This worker's engine has no {feature}; {what}."


def test_an_unknown_processor_is_told_which_ones_there_are() -> None:
    body = msgspec.structs.replace(PLAIN, processors=[Processor("mask"), Processor("made-up")])
    problem = missing(body, {"processor:mask", "processor:schedule", "seed"})
    assert problem is not None
    assert (problem.code, problem.field) == ("unsupported", "processors")
    assert problem.message.endswith("registered are: mask, schedule.")


@pytest.mark.parametrize("lora", ["", "judge", "judge@3"])
def test_an_adapter_that_is_loaded_may_be_named(lora: str) -> None:
    assert unknown_adapter(lora, {"judge": 3}) is None


@pytest.mark.parametrize("lora", ["judge@2", "other", "other@3"])
def test_an_adapter_that_is_not_loaded_is_refused_with_those_that_are(lora: str) -> None:
    problem = unknown_adapter(lora, {"judge": 3})
    assert problem is not None
    assert (problem.code, problem.field) == ("bad_request", "lora")
    assert "judge@3" in problem.message
