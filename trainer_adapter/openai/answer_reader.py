"""Splits a model's output, while it arrives, into content, reasoning and tool calls."""

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.openai.bodies import Json

ResponseTemplate = Mapping[str, Any]
"""See "Response parsing" in the documentation of transformers."""


def _template(marks: Sequence[str] = (), **tool_calls: object) -> ResponseTemplate:
    """Calls as `tool_calls` says; `marks` stand around them; all else is the answer's content."""
    fields: dict[str, object] = {
        "tool_calls": {"repeats": True, "content": "text", **tool_calls},
        "content": {"content": "text", "content_args": {"strip": False}},
    }
    if marks:  # each is a region that ends at once
        fields["marks"] = {"open": list(marks), "close_pattern": r"(?=.)|\Z", "repeats": True}
    # What the chat template has written before the answer is not looked at.
    return {"version": 1, "start_anchor_pattern": r"\Z", "fields": fields}


def _marked(name: str) -> str:
    """A special token of DeepSeek's."""
    return f"<\N{FULLWIDTH VERTICAL LINE}{name}\N{FULLWIDTH VERTICAL LINE}>"


_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}

_HERMES = _template(open_pattern=r"\s*<tool_call>", close="</tool_call>")

TOOL_FORMATS: Mapping[str, ResponseTemplate] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "llama3": _template(
        open_pattern=r"(?:\A\s*|<\|python_tag\|>\s*|(?<=\})\s*;\s*)(?=\{\s*\"name\")",
        close_pattern=r"(?<=\})(?=\s*;\s*\{\s*\"name\")",
    ),
    "mistral": _template(open_pattern=r"\s*\[TOOL_CALLS\](?=\s*\[)", close_pattern=r"\Z"),
    "mistral-args": _template(
        open_pattern=r"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])",
        transform=_NAMED,
    ),
    "deepseek-v3": _template(
        marks=[_marked("tool▁calls▁begin"), _marked("tool▁calls▁end")],
        open_pattern=rf"\s*{_marked('tool▁call▁begin')}function{_marked('tool▁sep')}"
        r"(?P<name>[^\n]+)\n```json\n",
        close_pattern=rf"\n```{_marked('tool▁call▁end')}",
        transform=_NAMED,
    ),
    "kimi-k2": _template(
        marks=["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
        open_pattern=r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+):\d+\s*"
        r"<\|tool_call_argument_begin\|>",
        close="<|tool_call_end|>",
        transform=_NAMED,
    ),
    "qwen3-coder": _template(
        open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        transform=_NAMED,
    ),
    "glm-4.5": _template(
        open_pattern=r"\s*<tool_call>\s*(?P<name>[^\n<]+)\n",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*"
            r"<arg_value>\s*(?P<value>.*?)\s*</arg_value>"
        },
        transform=_NAMED,
    ),
}
"""Name of a format -> its template."""


REASONING_FORMATS: Mapping[str, tuple[str, str]] = {
    "deepseek-r1": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "mistral": ("[THINK]", "[/THINK]"),
    "qwen3": ("<think>", "</think>"),
}
"""Name of a format, as SGLang has it -> what stands before and after reasoning."""
_NO_CALLS: ResponseTemplate = {
    "version": 1,
    "fields": {"content": {"content": "text", "content_args": {"strip": False}}},
}


def with_reasoning(
    template: ResponseTemplate | None, reasoning: str, prompt: str
) -> tuple[ResponseTemplate, str]:
    """A template that reads reasoning as well, and the beginning of the answer in the prompt.

    Args:
        template: of tool calls; None: they are content.
        reasoning: name of a format; empty: it is content.
        prompt: the text before the answer, which may have begun or ended its reasoning.
    """
    fields: dict[str, Any] = dict((template or _NO_CALLS)["fields"])
    before = ""
    if reasoning:
        first, last = REASONING_FORMATS[reasoning]
        if not prompt.rstrip().endswith(last):
            around = {
                "open_pattern": rf"\s*{re.escape(first)}\s*",
                "close_pattern": rf"\s*{re.escape(last)}\s*",
            }
            fields = {"reasoning_content": {"content": "text", **around}, **fields}
            before = first if prompt.rstrip().endswith(first) else ""
    return {**(template or _NO_CALLS), "start_anchor_pattern": r"\A", "fields": fields}, before


READS_CALLS = "5.19"
"""The oldest release of transformers that our formats were tested with; 5.12 has no such parser."""
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
"""What templates call it."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """More text."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, whole."""

    name: str
    arguments: str
    """JSON, as the model wrote it where it wrote JSON."""


class _Parser(Protocol):
    """The part of transformers' `ResponseParser` that is used."""

    initial_events: list[Json]

    def feed(self, text: str) -> list[Json]: ...

    def finalize(self) -> tuple[Json, list[Json]]: ...


class AnswerReader:
    """Of one answer."""

    def __init__(self, template: ResponseTemplate, prompt: str, tools: Sequence[Json]) -> None:
        """Ready to read.

        Args:
            template: how the model writes.
            prompt: the text before the answer, which may have begun it.
            tools: whose parameters' types are given to arguments written as plain text.

        Raises:
            SettingsError: transformers is not installed, or the template is none.
        """
        self._parser: _Parser | None = _parser(template, prompt, tools)
        self._unread = ""
        """Of a call that has not ended yet."""

    def feed(self, text: str) -> list[AnswerPiece | Call]:
        """The text goes on."""
        if self._parser is None:
            return _content(text)
        try:
            return list(self._read(self._parser.feed(text)))
        except (ValueError, KeyError):
            return self._gave_up(text)

    def end(self) -> list[AnswerPiece | Call]:
        """There is no more text."""
        if self._parser is None:
            return []
        try:
            return list(self._read(self._parser.finalize()[1]))
        except (ValueError, KeyError):
            return self._gave_up("")

    def _gave_up(self, text: str) -> list[AnswerPiece | Call]:
        """A call that its template cannot read, and all after it, is content."""
        self._parser = None
        return _content(self._unread + text)

    def _read(self, events: Sequence[Json]) -> Iterator[AnswerPiece | Call]:
        for event in events:
            field, kind = str(event["field"]), event["type"]
            if field == "tool_calls":
                if kind == "region_chunk":
                    self._unread += event["text"]
                elif kind == "region_close":
                    written, self._unread = self._unread, ""
                    yield from _calls(event["value"], written)
            elif kind == "region_chunk" and field == "content":
                yield AnswerPiece("content", event["text"])
            elif kind == "region_chunk" and field in REASONING:
                yield AnswerPiece("reasoning", event["text"])


def _content(text: str) -> list[AnswerPiece | Call]:
    return [AnswerPiece("content", text)] if text else []


def _calls(value: Any, written: str) -> list[AnswerPiece | Call]:  # noqa: ANN401 - what a template makes
    """The calls that a region holds; its text as content if it holds none."""
    try:
        parsed: Any = json.loads(value) if isinstance(value, str) else value
        told = cast("list[Any]", parsed) if isinstance(parsed, list) else [parsed]
        return [call_in(each) for each in told]
    except (ValueError, TypeError, KeyError, AttributeError):
        return _content(written)


def call_in(told: Mapping[str, Any]) -> Call:
    """The call that an object tells; raises ValueError and its like if it tells none."""
    function = told.get("function", told)
    name = function["name"]
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        if not isinstance(json.loads(arguments or "{}"), dict):
            raise TypeError("arguments are an object")
        arguments = arguments.strip() or "{}"
    elif isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        raise TypeError("arguments are an object")
    if not isinstance(name, str) or not name.strip():
        raise TypeError("a call has a name")
    return Call(name.strip(), arguments)


def _parser(template: ResponseTemplate, prompt: str, tools: Sequence[Json]) -> _Parser:
    missing = lacking()
    if missing:
        raise SettingsError(missing)
    # An optional dependency, and the one package that knows these templates.
    from transformers.utils.chat_parsing import ResponseParser  # noqa: PLC0415

    try:
        return cast("_Parser", ResponseParser(dict(template), prompt, tools=list(tools)))
    except ValueError as error:
        raise SettingsError(f"response template: {error}") from error


def lacking() -> str:
    """Explains why transformers cannot read answers here, and what to do; empty: it can."""
    if importlib.util.find_spec("transformers") is None:
        return "tool calls are read by transformers: pip install rolloutbus[transformers]"
    if importlib.util.find_spec("transformers.utils.chat_parsing") is not None:
        return ""
    there = importlib.metadata.version("transformers")
    return (
        f"tool calls are read by transformers {READS_CALLS} or newer, and {there} is installed "
        "here; if SGLang pins that, give it an environment of its own: up(python=...) or "
        "--engine-python"
    )
