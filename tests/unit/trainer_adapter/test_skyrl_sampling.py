"""SkyRL's batches and vLLM's sampling parameters in the bus's terms; nothing of SkyRL is needed."""

from typing import Any

import pytest

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import Grammar, SamplingParams
from rolloutbus.trainer_adapter.frameworks.skyrl.sampling import Sampling, checked_input

OF_TRAINER: dict[str, Any] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 64,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": ["</a>"],
}
"""As SkyRL's trainer makes them."""


class Turns:
    """A tokenizer that counts what it is told."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [len(text), int(add_special_tokens)]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return f"{token_ids} {skip_special_tokens}"

    def apply_chat_template(self, conversation: list[Any], **kwargs: Any) -> Any:  # noqa: ANN401
        assert kwargs == {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": False,
        }
        return [[len(turns)] for turns in conversation]

    @property
    def all_special_ids(self) -> list[int]:
        return []


def test_what_the_trainer_makes_is_understood() -> None:
    sampling = Sampling.of(OF_TRAINER)
    assert sampling.params == SamplingParams(
        max_new_tokens=64, min_new_tokens=1, temperature=0.5, top_p=0.9, stop=["</a>"]
    )
    assert (sampling.with_logprobs, sampling.skips_special, sampling.cut_at) == (True, True, ())


def test_a_stop_text_is_cut_off_unless_it_is_to_stay() -> None:
    assert Sampling.of({"max_tokens": 1, "stop": "x"}).cut_at == ("x",)


class Letters(Turns):
    """A tokenizer whose tokens are letters; the special one is a bar."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text = "".join(map(chr, token_ids))
        return text.replace("|", "") if skip_special_tokens else text


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"stop": "x"}, "a"),
        ({"stop": "x", "min_tokens": 2}, "axb"),  # the first one is too early to end it
        ({"stop": "x", "include_stop_str_in_output": True}, "axbx"),
        ({"stop": "x", "min_tokens": 2, "skip_special_tokens": False}, "axb|"),
        ({}, "axbx"),
    ],
)
def test_a_text_ends_before_the_stop_text_that_ended_its_response(
    asked: dict[str, Any], text: str
) -> None:
    tokens = list(b"axb|x")
    assert Sampling.of({"max_tokens": 9, **asked}).text_of(tokens, Letters()) == text


def test_masks_go_to_the_request() -> None:
    sampling = Sampling.of({"max_tokens": 1, "action_mask": [1, 2], "disallowed_tokens": None})
    assert sampling.options == {"action_mask": [1, 2]}


@pytest.mark.parametrize("kind", ["regex", "ebnf"])
def test_a_grammar_goes_to_the_request(kind: str) -> None:
    sampling = Sampling.of({"max_tokens": 1, kind: "a+"})
    assert sampling.options == {"grammar": Grammar(kind, "a+")}


def test_a_response_format_goes_to_the_request() -> None:
    sampling = Sampling.of({"max_tokens": 1, "response_format": {"type": "json_object"}})
    assert sampling.options == {"grammar": Grammar("json_schema", '{"type": "object"}')}


@pytest.mark.parametrize("name", ["max_generate_length", "max_completion_tokens"])
def test_other_names_of_max_tokens(name: str) -> None:
    assert Sampling.of({name: 7}).params.max_new_tokens == 7
    with pytest.raises(Refused, match="leave one out") as caught:
        Sampling.of({name: 7, "max_tokens": 7})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (None, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "n": 2}, "n"),
        ({"max_tokens": 1, "logprobs": 2}, "logprobs"),
        ({"max_tokens": 1, "temprature": 0.1}, "temprature"),
        ({"max_tokens": 1, "best_of": 2}, "best_of"),
        ({"max_tokens": 1, "echo": True}, "echo"),
        ({"max_tokens": 1, "stream": True}, "stream"),
        ({"max_tokens": 1, "stream_options": {}}, "stream_options"),
        ({"max_tokens": 1, "suffix": "."}, "suffix"),
        ({"max_tokens": 1, "regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ],
)
def test_wrong_parameters_are_named(given: dict[str, Any] | None, field: str) -> None:
    with pytest.raises(Refused) as caught:
        Sampling.of(given)
    assert caught.value.field == field


def test_prompts_are_token_ids_or_conversations() -> None:
    tokens = {"prompts": None, "prompt_token_ids": [[1, 2]], "session_ids": [7]}
    assert checked_input(tokens, Turns()) == ([[1, 2]], ["7"])
    assert checked_input({"prompts": [[{}, {}], [{}]]}, Turns()) == ([[2], [1]], None)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt_token_ids"),
    ({"prompts": [], "prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1]], "session_ids": ["a", "b"]}, "session_ids"),
    ({"prompt_token_ids": [[1]], "mm_features": [{}]}, "mm_features"),
    ({"prompt_token_ids": [[1]], "cache_salt": "v1"}, "cache_salt"),
    ({"prompt_token_ids": [[1]], "sessions": ["a"]}, "sessions"),
]


@pytest.mark.parametrize(("batch", "field"), WRONG)
def test_wrong_batches_are_named(batch: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        checked_input(batch, Turns())
    assert caught.value.field == field
