"""Samples of tool calls, by which our formats are tested, are what SGLang's parser reads too."""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.client.text import TextPieces
from rolloutbus.trainer_adapter.openai.answer_reader import (
    READS_CALLS,
    TOOL_FORMATS,
    AnswerReader,
    Call,
)
from tests.architecture.source_tree import ROOT
from tests.tool_call_samples import ARGUMENTS, ONE, TOOLS, TWO

PROGRAM = """
import json, re, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from rolloutbus.trainer_adapter.openai.answer_reader import AnswerPiece
from rolloutbus.trainer_adapter.openai.formats import answer_format
from rolloutbus.trainer_adapter.openai.sglang_reader import sglang_parsers


class WithTemplate:
    def __init__(self, text):
        self.chat_template = text

    def get_vocab(self):
        return {}


def read(reader, text):
    told = []
    for piece in re.findall(PIECES, text, re.DOTALL) if isinstance(text, str) else text:
        told += reader.feed(piece)
    told += reader.end()
    texts = {"reasoning": "", "content": ""}
    for each in told:
        if isinstance(each, AnswerPiece):
            texts[each.kind] += each.text
    calls = [each for each in told if not isinstance(each, AnswerPiece)]
    calls = [[call.name, json.loads(call.arguments)] for call in calls]
    return [texts["reasoning"].strip(), texts["content"].strip(), calls]


PIECES = "<[|\\uff5c][^<>]*>|."  # a special token comes whole, all else letter by letter
asked, tools = json.load(sys.stdin)
parsers = sglang_parsers()
found = []
for tool_format, reasoning, template, prompt, text in asked:
    how = answer_format(tool_format, reasoning, WithTemplate(template), parsers)
    found.append([how.tools, how.reasoning, *read(how.reader(prompt, tools), text)])
print(json.dumps(found))
"""
"""SGLang is imported in a process of its own, which finds the stand-ins."""


def read_by_sglang(asked: list[list[Any]], tools: list[dict[str, Any]] = TOOLS) -> list[list[Any]]:
    """Of each (tool format, reasoning format, chat template, prompt, answer or its pieces): both
    formats, reasoning, content and calls."""
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        input=json.dumps([asked, tools]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


QWEN3 = (
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "<tool_call>{}</tool_call>"
)


@pytest.mark.shows("tool_call_parser")
def test_sglang_recognises_formats_and_reads_what_we_read() -> None:
    samples = [*ONE.items(), *TWO.items()]
    before = dict.fromkeys(ONE, "Hm.\n") | {"llama3": ""}
    unknown = ONE["hermes"].replace("get_weather", "get_wether")
    broken = ONE["hermes"].replace('"days": 3', '"days": ')
    begun, begins = "user: hi <think>\n", "<think>\nhm.</think>\n\n"
    found = read_by_sglang(
        [
            ["", "", QWEN3, "", f"{begins}Yes.{ONE['hermes']}"],
            ["", "", QWEN3, begun, f"hm.</think>Yes.{ONE['hermes']}"],
            ["", "", QWEN3, "<think>\n\n</think>\n\n", "Yes."],
            ["", "", QWEN3, "", f"{begins}Yes.{unknown}"],
            ["", "", QWEN3, "", f"{begins}Yes.{broken}"],
            *([name, "none", "", "", before[name] + text] for name, text in samples),
        ]
    )
    called = [["get_weather", ARGUMENTS]]
    assert [each[:2] for each in found[:5]] == [["qwen", "qwen3"]] * 5
    assert found[0][2:] == found[1][2:] == ["hm.", "Yes.", called]
    assert found[2][2:] == ["", "Yes.", []]
    assert found[3][2:] == ["hm.", "Yes.", [["get_wether", ARGUMENTS]]], "whoever was called"
    assert found[4][4] == []
    assert '"days": ' in found[4][3], "what is no call stays in the content"
    calls, contents = zip(*[(each[4], each[3]) for each in found[5:]], strict=True)
    assert list(calls) == [called] * len(ONE) + [2 * called] * len(TWO)
    assert list(contents) == 2 * [each.strip() for each in before.values()]


def pieces(text: str, stop: Sequence[str]) -> list[str]:
    """As they are streamed with stop texts: a special token or a word is a token."""
    texts = re.findall(r"</?think>|</?tool_call>| ?\w+|.", text, re.DOTALL)
    told = TextPieces(lambda tokens: "".join(texts[token] for token in tokens), stop)
    last = len(texts) - 1
    return [told.add(at, [at], is_last=at == last) for at in range(len(texts))]


@pytest.mark.parametrize("stop", ["Observation:", "</s>", "\n\n\n"])
def test_sglang_reads_reasoning_of_which_stop_texts_hold_back_the_end(stop: str) -> None:
    answer = f"<think>\nI look it up.\n</think>\n\nThe weather: {ONE['hermes']}"
    asked = [
        ["qwen", "qwen3", "", "", pieces(answer, [stop])],
        ["qwen", "qwen3", "", "<think>\n", pieces(answer.removeprefix("<think>\n"), [stop])],
        ["qwen", "qwen3", "", "", pieces("<think>a < b</think>if a <", [stop])],
        ["qwen", "qwen3", "", "", pieces("<think>a <", [stop])],
    ]
    called = [["get_weather", ARGUMENTS]]
    assert [each[2:] for each in read_by_sglang(asked)] == [
        ["I look it up.", "The weather:", called],
        ["I look it up.", "The weather:", called],
        ["a < b", "if a <", []],
        ["a <", "", []],
    ]


def test_content_before_a_call_is_told_whatever_its_pieces_are() -> None:
    call = ONE["hermes"].removeprefix("<tool_call>")
    ways = [
        ["\n\nLet", " me check", " the weather.\n<tool_call>", call],
        ["\n\n", f"Let me check the weather.\n<tool_call>{call}"],
        ["Let me check the weather.\n", f"<tool_call>{call}"],
        [f"\n\nLet me check the weather.\n<tool_call>{call}"],
    ]
    found = read_by_sglang([["qwen", "none", "", "", way] for way in ways])
    told = ["Let me check the weather.", [["get_weather", ARGUMENTS]]]
    assert [each[3:] for each in found] == [told] * len(ways)


@pytest.mark.parametrize("name", ["hermes", "deepseek-v3", "kimi-k2"])
def test_a_mark_of_a_call_that_is_cut_anywhere_is_no_content(name: str) -> None:
    answer = f"Let me check.\n{ONE[name]}"
    ways = [re.findall(f".{{1,{n}}}", answer, re.DOTALL) for n in range(1, 12)]
    found = read_by_sglang([[name, "none", "", "", way] for way in ways])
    told = ["Let me check.", [["get_weather", ARGUMENTS]]]
    assert [each[3:] for each in found] == [told] * len(ways)


def test_what_sglang_cannot_read_as_a_call_stays_content() -> None:
    written = [
        *('["f"]', "5", '"f"', '{"arguments": {}}', '{"name": 5, "arguments": {}}'),
        *('{"name": "get_weather", "arguments": "x"}', '{"name": "get_weather", "arguments": [1]}'),
    ]
    answers = [f"Well.\n<tool_call>\n{each}\n</tool_call>" for each in written]
    answers.append(f"{ONE['hermes']}\n{answers[0]}")
    found = read_by_sglang([["qwen", "none", "", "", answer] for answer in answers])
    assert [each[3:] for each in found] == [[answer, []] for answer in answers]


def test_sglang_reads_arguments_that_are_written_as_a_text() -> None:
    call = json.dumps({"name": "get_weather", "arguments": json.dumps(ARGUMENTS)})
    answer = f"<tool_call>\n{call}\n</tool_call>"
    [found] = read_by_sglang([["qwen", "none", "", "", answer]])
    assert found[3:] == ["", [["get_weather", ARGUMENTS]]]


def test_calls_are_read_with_the_transformers_that_sglang_pins_or_it_says_what_to_do() -> None:
    version = importlib.metadata.version("transformers")
    if tuple(map(int, version.split(".")[:2])) < tuple(map(int, READS_CALLS.split("."))):
        with pytest.raises(SettingsError, match=f"{READS_CALLS} or newer, and {version} is inst"):
            AnswerReader(TOOL_FORMATS["hermes"], "", TOOLS)
        return
    for name, text in ONE.items():
        reader = AnswerReader(TOOL_FORMATS[name], "", TOOLS)
        calls = [each for each in [*reader.feed(text), *reader.end()] if isinstance(each, Call)]
        assert [(each.name, json.loads(each.arguments)) for each in calls] == [
            ("get_weather", ARGUMENTS)
        ]
