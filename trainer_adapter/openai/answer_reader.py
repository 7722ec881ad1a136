"""What a model writes, taken apart while it comes: content, reasoning, tool calls."""

import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.openai.bodies import Json
from rolloutbus.trainer_adapter.openai.tool_formats import ResponseTemplate

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
        return [_call(each) for each in told]
    except (ValueError, TypeError, KeyError, AttributeError):
        return _content(written)


def _call(told: Mapping[str, Any]) -> Call:
    """Raises ValueError and its like: it is no call."""
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
    try:
        # An optional dependency, and the one package that knows these templates.
        from transformers.utils.chat_parsing import ResponseParser  # noqa: PLC0415
    except ImportError:
        raise SettingsError(_lacking()) from None
    try:
        return cast("_Parser", ResponseParser(dict(template), prompt, tools=list(tools)))
    except ValueError as error:
        raise SettingsError(f"response template: {error}") from error


def _lacking() -> str:
    """Why transformers cannot be asked, and what to do."""
    try:
        there = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "tool calls are read by transformers: pip install rolloutbus[transformers]"
    return (
        f"tool calls are read by transformers {READS_CALLS} or newer, and {there} is installed "
        "here; if SGLang pins that, give it an environment of its own: up(python=...) or "
        "--engine-python"
    )
