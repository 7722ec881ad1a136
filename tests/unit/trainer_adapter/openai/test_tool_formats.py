"""Tool calls as several models write them, read at once and piece by piece."""

import json
from typing import Any

import pytest

from rolloutbus.trainer_adapter.openai.answer_reader import (
    TOOL_FORMATS,
    AnswerPiece,
    AnswerReader,
    Call,
)
from tests.tool_call_samples import ARGUMENTS, ONE, TOOLS, TWO

BEFORE = "Let me see."


def read(name: str, text: str, size: int = 10_000) -> list[AnswerPiece | Call]:
    reader = AnswerReader(TOOL_FORMATS[name], "", TOOLS)
    found: list[AnswerPiece | Call] = []
    for at in range(0, len(text), size):
        found += reader.feed(text[at : at + size])
    return [*found, *reader.end()]


def calls(found: list[AnswerPiece | Call]) -> list[tuple[str, Any]]:
    return [(each.name, json.loads(each.arguments)) for each in found if isinstance(each, Call)]


def content(found: list[AnswerPiece | Call]) -> str:
    return "".join(each.text for each in found if isinstance(each, AnswerPiece))


def test_there_is_a_sample_of_every_format() -> None:
    assert ONE.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_is_read_whatever_pieces_it_comes_in(name: str, size: int) -> None:
    found = read(name, ONE[name], size)
    assert calls(found) == [("get_weather", ARGUMENTS)]
    assert content(found).strip() == ""


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_several_calls_are_read_in_order(name: str, size: int) -> None:
    found = read(name, TWO[name], size)
    assert calls(found) == 2 * [("get_weather", ARGUMENTS)]
    assert content(found).strip() == ""


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"llama3"}))
def test_what_is_said_before_a_call_is_content(name: str) -> None:
    found = read(name, f"{BEFORE}\n{ONE[name]}", 1)
    assert calls(found) == [("get_weather", ARGUMENTS)]
    assert content(found).strip() == BEFORE


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_plain_text_is_content_to_the_letter(name: str) -> None:
    text = "  Two lines,\n{no call}; <b>nothing</b> [1, 2]\n "
    assert content(read(name, text, 1)) == text


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"qwen3-coder", "glm-4.5"}))
def test_a_call_that_is_no_json_stays_in_the_content(name: str) -> None:
    broken = ONE[name].replace('"days": 3', '"days": ')
    found = read(name, f"{broken} and more", 5)
    assert calls(found) == []
    assert '"days": ' in content(found)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_that_was_cut_off_is_no_call(name: str) -> None:
    cut = ONE[name][: ONE[name].index("days")]
    found = read(name, cut, 3)
    assert [arguments for _, arguments in calls(found) if "days" in arguments] == []
    assert content(found) or calls(found), "nothing gets lost"


def test_a_template_of_ones_own_may_tell_reasoning() -> None:
    template = {
        "start_anchor": "assistant:",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    reader = AnswerReader(template, "user: hi assistant:<think>", ())
    found = [*reader.feed("hm</think>Yes."), *reader.feed("<call>{broken</call> after")]
    found += reader.end()
    assert found[:2] == [AnswerPiece("reasoning", "hm"), AnswerPiece("content", "Yes.")]
    assert "{broken" in content(found[2:])
    assert " after" in content(found[2:])
