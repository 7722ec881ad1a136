"""Bodies as they come: what is wrong with them is told by field, what is right is understood."""

import base64
from typing import Any

import pytest

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import Media
from rolloutbus.trainer_adapter.openai.bodies import (
    ChatBody,
    CompletionBody,
    body_of,
    options_of,
    sampling_of,
)
from rolloutbus.trainer_adapter.openai.prompts import chat_prompt, conversation_of, prompts_of

HELLO = [{"role": "user", "content": "hello"}]
PNG = b"\x89PNG..."
DATA = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


class Letters:
    """A tokenizer whose template says the roles."""

    def __init__(self) -> None:
        self.all_special_ids: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0, *text.encode()] if add_special_tokens else list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return bytes(token_ids).decode()

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:  # noqa: ANN401
        if kwargs.get("is_broken"):
            raise RuntimeError("roles must alternate")
        names = [tool["function"]["name"] for tool in kwargs["tools"] or ()]
        return "".join([*names, *(f"{each['role']}|" for each in conversation)])


def chat(**fields: Any) -> ChatBody:  # noqa: ANN401 - as above
    return body_of({"messages": HELLO, **fields}, ChatBody)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": "hello"}, "messages"),
        ({"n": "2"}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_a_field_of_another_type_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        chat(**fields)
    assert caught.value.field.startswith(field)


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(Refused) as caught:
        body_of({"model": "m"}, CompletionBody)
    assert caught.value.field == "prompt"


def test_fields_that_change_nothing_are_passed_over_and_null_is_absence() -> None:
    body = chat(user="me", metadata={"a": "b"}, seed=None, stop=None, n=None)
    assert sampling_of(body, 7).max_new_tokens == 7


def test_sampling_parameters_have_our_names() -> None:
    body = chat(
        max_completion_tokens=5,
        max_tokens=9,
        temperature=0.5,
        top_k=-1,
        stop="end",
        min_tokens=2,
        logit_bias={"17": -100},
        seed=3,
    )
    sampling = sampling_of(body, 1)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (5, 2)
    assert (sampling.temperature, sampling.top_k, sampling.sampling_seed) == (0.5, 0, 3)
    assert (sampling.stop, sampling.logit_bias) == (["end"], {17: -100.0})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"frequency_penalty": 9}, "frequency_penalty"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"stop": ["x"] * 100}, "stop"),
    ],
)
def test_a_value_out_of_range_is_named_as_the_body_names_it(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(Refused) as caught:
        sampling_of(chat(**fields), 1)
    assert caught.value.field == field


def test_what_else_a_body_may_say_becomes_options() -> None:
    body = chat(
        session_id="s",
        policy="p",
        versions="min:3",
        lora_path="a@2",
        priority=4,
        timeout=9.5,
    )
    assert options_of(body) == {
        "session": "s",
        "policy": "p",
        "versions": "min:3",
        "lora": "a@2",
        "priority": 4,
        "deadline_s": 9.5,
    }
    assert options_of(chat()) == {}


def test_media_leave_their_place_and_come_as_bytes() -> None:
    parts = [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": DATA}},
        {"type": "video_url", "video_url": DATA},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode()}},
    ]
    found = conversation_of([{"role": "user", "content": parts}])
    assert found.messages[0]["content"] == [
        {"type": "text", "text": "what is"},
        {"type": "image"},
        {"type": "video"},
        {"type": "audio"},
    ]
    assert found.media == [Media("image", PNG), Media("video", PNG), Media("audio", b"RIFF")]


def test_parts_that_are_all_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation_of([{"role": "user", "content": parts}]).messages[0]["content"] == "ab"


def test_arguments_of_earlier_calls_are_objects_for_the_template() -> None:
    call: dict[str, Any] = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    told = {"role": "assistant", "content": None, "tool_calls": [call]}
    [message] = conversation_of([told]).messages
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert call["function"]["arguments"] == '{"a": 1}', "the caller's body stays as it is"


def image(url: object) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (image("http://127.0.0.1/x.png"), "messages[0].content[0].image_url.url"),
        (image("file:///etc/passwd"), "messages[0].content[0].image_url.url"),
        (image("data:image/png,abc"), "messages[0].content[0].image_url.url"),
        (image("data:image/png;base64,!!"), "messages[0].content[0].image_url.url"),
        (image(7), "messages[0].content[0].image_url.url"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content[0]"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "robot", "content": "hi"}, "messages[0].role"),
        ({"role": ["user"], "content": "hi"}, "messages[0].role"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_the_part_that_is_wrong_is_named_and_nothing_is_fetched(
    message: dict[str, Any], field: str
) -> None:
    with pytest.raises(Refused) as caught:
        conversation_of([message])
    assert caught.value.field == field


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat_prompt(chat(tools=tools), Letters()).text == "fuser|"
    prompt = chat_prompt(chat(tools=tools, tool_choice="none"), Letters())
    assert (prompt.text, prompt.tools) == ("user|", [])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_te"),
        ({"chat_template_kwargs": {"is_broken": True}}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_rendered_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        chat_prompt(chat(**fields), Letters())
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize("prompt", [7, [], [True], ["a", 1], [1.5], {"a": 1}])
def test_a_prompt_that_is_none_is_named(prompt: object) -> None:
    body = body_of({"prompt": prompt}, CompletionBody)
    with pytest.raises(Refused) as caught:
        prompts_of(body, Letters())
    assert caught.value.field == "prompt"


class Untemplated(Letters):
    """A tokenizer of transformers without a chat template."""

    chat_template = None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:  # noqa: ANN401
        del conversation, kwargs
        raise ValueError("tokenizer.chat_template is not set")


def test_a_model_without_a_chat_template_says_what_to_do_instead() -> None:
    with pytest.raises(Refused, match=r"/v1/completions.*chat_template\.jinja") as caught:
        chat_prompt(chat(), Untemplated())
    assert caught.value.field == "messages"
    assert "template says" not in str(caught.value)
