"""How a model writes is recognised from its chat template, and its reasoning is read."""

from dataclasses import dataclass
from typing import Any

import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.openai.answer_reader import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerPiece,
)
from rolloutbus.trainer_adapter.openai.formats import CALL_ENDS, UNREAD, AnswerFormat, answer_format
from tests.tool_call_samples import ONE, TOOLS, TWO


@dataclass
class WithTemplate:
    """A tokenizer, as far as it is looked at."""

    chat_template: str | None
    response_template: dict[str, Any] | None = None


def told(found: AnswerFormat, text: str, size: int, prompt: str = "") -> tuple[str, str, int]:
    """Reasoning, content and number of calls."""
    reader = found.reader(prompt, TOOLS)
    assert reader is not None
    read = [each for at in range(0, len(text), size) for each in reader.feed(text[at : at + size])]
    read += reader.end()
    pieces = [each for each in read if isinstance(each, AnswerPiece)]
    texts = dict.fromkeys(("reasoning", "content"), "")
    for piece in pieces:
        texts[piece.kind] += piece.text
    return texts["reasoning"], texts["content"], len(read) - len(pieces)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"qwen", "llama3", "hermes"}))
def test_template_that_writes_calls_tells_their_format(name: str) -> None:
    assert answer_format("", "", WithTemplate(ONE[name])).tools == name


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (
            '<tool_call>{"name": <name>, "arguments": {}}</tool_call>{{ x.split("</think>")[-1] }}',
            "hermes",
            "qwen3",
        ),
        (
            '<|start_header_id|>ipython<|end_header_id|> {"name": function name, "parameters": {}}',
            "llama3",
            "",
        ),
        ("{{ '[TOOL_CALLS]' }}{{ '[THINK]' }}", "mistral", "mistral"),
        ("{{ messages[0].content }}", "", ""),
        (None, "", ""),
    ],
)
def test_what_is_recognised(template: str | None, tools: str, reasoning: str) -> None:
    found = answer_format("", "", WithTemplate(template))
    assert (found.tools, found.reasoning) == (tools, reasoning)
    assert bool(found.unrecognised) == (not tools)


def test_what_is_not_recognised_is_content_and_said_with_the_names_there_are() -> None:
    found = answer_format("", "", WithTemplate("{{ messages }}"))
    assert found.reader("", TOOLS) is None
    assert "--tool-format" in found.unrecognised
    assert "hermes" in found.unrecognised
    without = answer_format("hermes", "", WithTemplate(None)).unrecognised
    assert "no chat template" in without
    assert "tool" not in without
    unread = answer_format(UNREAD, UNREAD, WithTemplate(ONE["hermes"]))
    assert unread.reader("", TOOLS) is None
    assert unread.unrecognised == ""


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_is_told_apart_from_content_and_calls(name: str, size: int) -> None:
    first, last = REASONING_FORMATS[name]
    found = answer_format("hermes", name, WithTemplate(None))
    text = f"{first}\nIf < 3,\n then.\n{last}\n\nLet me see.{ONE['hermes']}"
    assert told(found, text, size) == ("If < 3,\n then.", "Let me see.", 1)
    begun = text.removeprefix(first)
    assert told(found, begun, size, f"user: hi {first}\n") == (
        "If < 3,\n then.",
        "Let me see.",
        1,
    )
    plain = f"{first}\n\n{last}\n\n"
    assert told(found, "  Plain text.", size, plain) == ("", "  Plain text.", 0)
    assert told(found, f"{first}cut o", size) == ("cut o", "", 0)


def test_models_own_template_goes_before_what_is_recognised() -> None:
    own = {"start_anchor_pattern": r"\Z", "fields": {"content": {"content": "text"}}}
    found = answer_format("", "", WithTemplate(ONE["hermes"], own))
    assert found.template == own
    assert answer_format("llama3", "", WithTemplate(ONE["hermes"], own)).tools == "llama3"
    with pytest.raises(SettingsError, match="reasoning_format"):
        answer_format(own, "qwen3", WithTemplate(None))


@pytest.mark.parametrize("name", CALL_ENDS)
def test_each_call_ends_with_what_is_told_to_be_its_end(name: str) -> None:
    assert TWO[name].count(answer_format(name, "", WithTemplate(None)).call_end) == 2
    assert answer_format("llama3", "", WithTemplate(None)).call_end == ""


def test_name_that_is_not_known_is_an_error_with_all_names() -> None:
    with pytest.raises(SettingsError, match=r"deepseek-v3, .*qwen3-coder; did you mean 'hermes'"):
        answer_format("hermez", "", WithTemplate(None))
    with pytest.raises(SettingsError, match=r"reasoning_format.*deepseek-r1, .*qwen3"):
        answer_format("", "thoughts", WithTemplate(None))
    assert answer_format("kimi_k2", "", WithTemplate(None)).tools == "kimi-k2", "SGLang's name"
