"""How a model writes reasoning and tool calls: recognised from its chat template, or named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.trainer_adapter.openai.answer_reader import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerPiece,
    AnswerReader,
    Call,
    ResponseTemplate,
    lacking,
    with_reasoning,
)
from rolloutbus.trainer_adapter.openai.bodies import Json
from rolloutbus.trainer_adapter.openai.sglang_reader import SglangParsers, SglangReader

NO_TEMPLATE = (
    "this model has no chat template, so it takes no chats: use /v1/completions, or put a template "
    "into the model's directory as chat_template.jinja and start again"
)
UNREAD = "none"
"""The format of what is left in the content."""

SGLANG_NAMES: Mapping[str, str] = {
    "deepseek-v3": "deepseekv3",
    "glm-4.5": "glm45",
    "kimi-k2": "kimi_k2",
    "mistral-args": "mistral",
    "qwen3-coder": "qwen3_coder",
}
"""Our name of a format of tool calls -> SGLang's; others are the same."""
OUR_NAMES: Mapping[str, str] = {
    "deepseekv3": "deepseek-v3",
    "glm": "glm-4.5",
    "glm45": "glm-4.5",
    "kimi_k2": "kimi-k2",
    "qwen25": "qwen",
    "qwen3_coder": "qwen3-coder",
}
"""The other way round, with names that mean the same."""

CALL_ENDS: Mapping[str, str] = {
    "deepseek-v3": "<\uff5ctool▁call▁end\uff5c>",
    "glm-4.5": "</tool_call>",
    "hermes": "</tool_call>",
    "kimi-k2": "<|tool_call_end|>",
    "qwen": "</tool_call>",
    "qwen3-coder": "</tool_call>",
}
"""Format of tool calls -> what stands at the end of each call; others have no such text."""

TOOL_MARKS: Sequence[tuple[str, Sequence[str]]] = (
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek-v3", ("tool▁calls▁begin", "```json")),
    ("kimi-k2", ("<|tool_calls_section_begin|>",)),
    ("qwen3-coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm-4.5", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>", "arguments")),
    ("llama3", ("<|start_header_id|>", "ipython", "parameters")),
)
"""Format of tool calls -> texts that all stand in the chat templates of its models."""
REASONING_MARKS: Sequence[tuple[str, Sequence[str]]] = (
    ("mistral", ("[THINK]",)),
    ("kimi", ("◁think▷",)),
    ("qwen3", ("</think>",)),
)
"""The same for reasoning."""


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[AnswerPiece | Call]:
        """The text goes on."""
        ...

    def end(self) -> list[AnswerPiece | Call]:
        """There is no more text."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one model writes, and what reads it."""

    tools: str = ""
    """Name of the format; empty: not recognised."""
    reasoning: str = ""
    template: ResponseTemplate | None = None
    """The model's own response template, which tells both."""
    parsers: SglangParsers | None = None
    """None: transformers reads."""
    lacks: str = ""
    """Why nothing can be read here."""
    takes_chats: bool = True
    """The model has a chat template."""

    def reader(self, prompt: str, tools: Sequence[Json]) -> Reader | None:
        """A reader of one answer; None: all of it is content.

        Args:
            prompt: the text before the answer.
            tools: that may be called; without any a call is content.

        Raises:
            SettingsError: what would read it is not installed.
        """
        if self.template is not None:
            return AnswerReader(self.template, prompt, tools)
        calls = self.tools if tools and self.tools != UNREAD else ""
        reasoning = self.reasoning if self.reasoning != UNREAD else ""
        if not calls and not reasoning:
            return None
        if self.parsers is not None:
            calls = SGLANG_NAMES.get(calls, calls)
            return SglangReader(self.parsers, calls, reasoning, prompt, tools)
        template, before = with_reasoning(TOOL_FORMATS.get(calls), reasoning, prompt)
        return AnswerReader(template, before, tools)

    @property
    def call_end(self) -> str:
        """What stands at the end of each call; empty: not known."""
        if self.template is not None:
            end: Any = self.template["fields"].get("tool_calls", {}).get("close")
            return end if isinstance(end, str) else ""
        return CALL_ENDS.get(OUR_NAMES.get(self.tools, self.tools), "")

    @property
    def unrecognised(self) -> str:
        """What to warn of at the start; empty if all answers of this model can be read."""
        if not self.takes_chats:
            return NO_TEMPLATE
        if self.template is not None or self.tools:
            return ""
        if self.lacks:
            return f"reasoning and tool calls stay in the content of answers: {self.lacks}"
        names = ", ".join(_tool_names(self.parsers))
        return (
            "the chat template does not tell how this model writes tool calls: they stay in the "
            f"content of answers; --tool-format names one of {names}"
        )


def answer_format(
    tool_format: str | ResponseTemplate,
    reasoning_format: str,
    tokenizer: object,
    parsers: SglangParsers | None = None,
) -> AnswerFormat:
    """How a model writes.

    Args:
        tool_format: a name, or a response template of transformers, which tells reasoning as well;
            empty: the tokenizer's own template, or what is recognised.
        reasoning_format: a name; empty: what is recognised.
        tokenizer: whose chat template is looked at.
        parsers: SGLang's; None: transformers reads.

    Raises:
        SettingsError: there is no such format.
    """
    if not isinstance(tool_format, str):
        if reasoning_format:
            raise SettingsError("reasoning_format: the response template tells it; leave it out")
        return AnswerFormat(template=tool_format)
    own: ResponseTemplate | None = getattr(tokenizer, "response_template", None)
    if own is not None and not tool_format and not reasoning_format:
        return AnswerFormat(template=own)
    chat_template: Any = getattr(tokenizer, "chat_template", None)
    # A tokenizer may have several, by name.
    text = str(chat_template or "")
    lacks = lacking() if parsers is None else ""
    if parsers is not None:
        tools, reasoning = parsers.recognised(text, tokenizer)
    elif lacks:
        tools = reasoning = ""
    else:
        tools, reasoning = _marked(text, TOOL_MARKS), _marked(text, REASONING_MARKS)
    if tool_format:
        tools = _known("tool_format", tool_format, _tool_names(parsers), OUR_NAMES)
    if reasoning_format:
        names = parsers.reasoning_formats if parsers else REASONING_FORMATS
        reasoning = _known("reasoning_format", reasoning_format, sorted([*names, UNREAD]), {})
    if lacks and {tools, reasoning} - {"", UNREAD}:
        raise SettingsError(lacks)
    takes_chats = not lacks_template(tokenizer)
    return AnswerFormat(tools, reasoning, parsers=parsers, lacks=lacks, takes_chats=takes_chats)


def lacks_template(tokenizer: object) -> bool:
    """Whether a tokenizer says that it has no chat template."""
    return getattr(tokenizer, "chat_template", "unknown") is None


def _tool_names(parsers: SglangParsers | None) -> list[str]:
    theirs = parsers.tool_formats if parsers is not None else frozenset[str]()
    return sorted({*TOOL_FORMATS, *theirs, UNREAD})


def _known(setting: str, name: str, names: Sequence[str], others: Mapping[str, str]) -> str:
    if name in names:
        return name
    if name in others:
        return others[name]
    near = nearest(name, names)
    hint = f"; did you mean {near!r}?" if near else ""
    raise SettingsError(f"{setting}: {name[:64]!r} is not among {', '.join(names)}{hint}")


def _marked(template: str, marks: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The first format whose marks are all there; empty: none."""
    return next((name for name, texts in marks if all(text in template for text in texts)), "")
