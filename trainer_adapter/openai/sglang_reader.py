"""Answers read by SGLang's own parsers of reasoning and tool calls, where it is installed."""

import importlib
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolloutbus.trainer_adapter.openai.answer_reader import AnswerPiece, Call, call_in
from rolloutbus.trainer_adapter.openai.bodies import Json, refusal

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SglangParsers:
    """The part of SGLang that reads answers; from `sglang_parsers`."""

    calls: Any
    """Its class of parsers of tool calls."""
    reasoning: Any
    """Its class of parsers of reasoning."""
    tool: Any
    """Its class of a tool."""
    detection: Any
    """Its module that recognises formats."""

    @property
    def tool_formats(self) -> frozenset[str]:
        """Names."""
        return frozenset(self.calls.ToolCallParserEnum)

    @property
    def reasoning_formats(self) -> frozenset[str]:
        """Names."""
        return frozenset(self.reasoning.DetectorMap)

    def recognised(self, template: str, tokenizer: object) -> tuple[str, str]:
        """Formats of tool calls and of reasoning, by a chat template and its vocabulary.

        Empty: not recognised.
        """
        forces, config = self.detection.detect_reasoning_pattern(template)
        given = template, tokenizer, config, forces
        tools = self.detection.detect_tool_call_parser(*given)
        return tools or "", self.detection.detect_reasoning_parser(*given) or ""


def sglang_parsers() -> SglangParsers | None:
    """SGLang's parsers; None if it is not installed here, or cannot be imported. Takes seconds."""
    if importlib.util.find_spec("sglang") is None:
        return None
    try:
        calls = importlib.import_module("sglang.srt.function_call.function_call_parser")
        parsers = SglangParsers(
            calls.FunctionCallParser,
            importlib.import_module("sglang.srt.parser.reasoning_parser").ReasoningParser,
            calls.Tool,
            importlib.import_module("sglang.srt.parser.template_detection"),
        )
        # Else it would lose the calls of tools that there are not, which a trainer wants to see.
        importlib.import_module("sglang.srt.environ").envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
    # It imports kernels of the device, which fail as they like.
    except Exception as error:  # noqa: BLE001 - as told above
        _log.warning("SGLang's parsers cannot be imported (%s); transformers reads answers", error)
        return None
    return parsers


class SglangReader:
    """Of one answer: what comes before a call is told as it comes, calls are told at the end.

    SGLang's parsers read calls piece by piece, too, but lose what is not quite a call.
    """

    def __init__(
        self,
        parsers: SglangParsers,
        tool_format: str,
        reasoning_format: str,
        prompt: str,
        tools: Sequence[Json],
    ) -> None:
        """Ready to read.

        Args:
            parsers: SGLang's.
            tool_format: SGLang's name; empty: calls are content.
            reasoning_format: SGLang's name; empty: reasoning is content.
            prompt: the text before the answer, which may have begun or ended its reasoning.
            tools: that may be called.

        Raises:
            Refused: SGLang does not take the tools.
        """
        self._new_calls: Any = None
        if tool_format and tools:
            try:
                known = [parsers.tool(**each) for each in tools]
            except ValueError as error:
                raise refusal("tools", f"SGLang's parser takes none of these: {error}") from error
            self._new_calls = lambda: parsers.calls(known, tool_format)
        self._calls: Any = self._new_calls() if self._new_calls else None
        self._held_content: str = ""
        """The end of the content, which may begin the mark of a call."""
        self._reasoning = _reasoning(parsers, reasoning_format, prompt)
        self._marks = _marks(self._reasoning)
        self._held = ""
        """The end of the text, which may begin a mark."""
        self._said = ""
        """Content that was told."""
        self._text = ""
        """All that is no reasoning."""

    def feed(self, text: str) -> list[AnswerPiece | Call]:
        """The text goes on."""
        if self._reasoning is None:
            return self._content(text)
        # Its parser finds a mark only in one piece, or where a piece begins with it.
        text = self._held + text
        n_told = len(text) - _n_begun(text, self._marks)
        self._held = text[n_told:]
        if not n_told:
            return []
        reasoning, rest = self._reasoning.parse_stream_chunk(text[:n_told])
        return [*_piece("reasoning", reasoning), *self._content(rest or "")]

    def end(self) -> list[AnswerPiece | Call]:
        """There is no more text."""
        found: list[AnswerPiece | Call] = []
        if self._reasoning is not None:
            reasoning, rest = self._reasoning.parse_stream_end()
            found += [*_piece("reasoning", reasoning), *self._content(rest or "")]
            # Its parser would hold it back, too, and drop it.
            if self._reasoning.detector._in_reasoning:  # noqa: SLF001 - nothing else tells it
                found += _piece("reasoning", self._held)
            else:
                found += self._content(self._held)
        if self._new_calls is None:
            return found
        whole, calls = self._read()
        return [*found, *_piece("content", _after(self._said, whole)), *calls]

    def _read(self) -> tuple[str, list[Call]]:
        """Content and calls.

        All is content if one of the calls is none: the parser does not tell where each one stands.
        """
        try:
            content, told = self._new_calls().parse_non_stream(self._text)
            calls = [_call(each) for each in told]
        # Its parsers fail as they like at what a model writes.
        except Exception as error:  # noqa: BLE001 - as told above
            _log.info("what SGLang's parser cannot read as calls stays content: %s", error)
            return self._text, []
        return (content, calls) if calls else (self._text, [])

    def _content(self, text: str) -> list[AnswerPiece | Call]:
        if not text:
            return []
        self._text += text
        told = text
        if self._calls is not None:
            if self._calls.has_tool_call(self._text):
                return []  # what is content here is known at the end
            # Its parser, too, may tell a part of a mark as content.
            text = self._held_content + text
            n_told = len(text) - _n_begun(text, [self._calls.detector.bot_token])
            self._held_content = text[n_told:]
            told = self._calls.parse_stream_chunk(text[:n_told])[0] if n_told else ""
        self._said += told
        return _piece("content", told)


def _reasoning(parsers: SglangParsers, name: str, prompt: str) -> Any:  # noqa: ANN401 - SGLang's
    """None: the answer has no reasoning."""
    if not name:
        return None
    plain = parsers.reasoning(name, stream_reasoning=True)
    before = prompt.rstrip()
    if before.endswith(plain.detector.think_end_token):
        return None
    if before.endswith(plain.detector.think_start_token):
        return parsers.reasoning(name, stream_reasoning=True, force_reasoning=True)
    return plain


def _call(told: Any) -> Call:  # noqa: ANN401 - SGLang's
    """The same, if it has a name and an object as arguments; else raises as `call_in`."""
    arguments = told.parameters or "{}"
    value = json.loads(arguments)
    # Arguments that the model wrote as a text are told as the JSON of a text.
    return call_in({"name": told.name, "arguments": value if isinstance(value, str) else arguments})


def _marks(reasoning: Any) -> list[str]:  # noqa: ANN401 - SGLang's
    """What begins or ends reasoning; none where there is none."""
    if reasoning is None:
        return []
    detector = reasoning.detector
    marks = (detector.think_start_token, detector.think_end_token, detector.tool_start_token)
    return [mark for mark in marks if mark]


def _n_begun(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of a text that are the beginning of a mark, but not all of it."""
    longest = max(map(len, marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    begun = (n for n in lengths if any(n < len(m) and m.startswith(text[-n:]) for m in marks))
    return next(begun, 0)


def _after(said: str, whole: str) -> str:
    """What of a content was not told yet; SGLang strips that of an answer with calls."""
    for told in (said, said.lstrip(), said.strip()):
        if whole.startswith(told):
            return whole[len(told) :]
    return ""


def _piece(kind: Any, text: str | None) -> list[AnswerPiece | Call]:  # noqa: ANN401 - its name
    return [AnswerPiece(kind, text)] if text else []
