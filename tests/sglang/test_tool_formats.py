"""Samples of tool calls, by which our formats are tested, are what SGLang's parser reads too."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.openai.answer_reader import (
    READS_CALLS,
    TOOL_FORMATS,
    AnswerReader,
    Call,
)
from tests.architecture.source_tree import ROOT
from tests.tool_call_samples import ARGUMENTS, ONE, TOOLS, TWO

THEIRS = {
    "deepseek-v3": "deepseekv3",
    "glm-4.5": "glm45",
    "hermes": "hermes",
    "kimi-k2": "kimi_k2",
    "llama3": "llama3",
    "mistral": "mistral",
    "mistral-args": "mistral",
    "qwen": "qwen25",
    "qwen3-coder": "qwen3_coder",
}
"""Our name of a format -> SGLang's."""
PROGRAM = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

samples, tools = json.load(sys.stdin)
found = []
for name, text in samples:
    _, calls = FunctionCallParser([Tool(**each) for each in tools], name).parse_non_stream(text)
    found.append([[call.name, json.loads(call.parameters)] for call in calls])
print(json.dumps(found))
"""
"""SGLang is imported in a process of its own, which finds the stand-ins."""


@pytest.mark.parametrize(("samples", "n_calls"), [(ONE, 1), (TWO, 2)], ids=["one", "two"])
def test_sglangs_parser_reads_the_same_calls(samples: dict[str, str], n_calls: int) -> None:
    given = [[THEIRS[name], text] for name, text in samples.items()]
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        input=json.dumps([given, TOOLS]),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(told.stdout.splitlines()[-1])
    expected = n_calls * [["get_weather", ARGUMENTS]]
    assert dict(zip(samples, found, strict=True)) == dict.fromkeys(samples, expected)


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
