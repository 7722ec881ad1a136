"""How models write tool calls: response templates for the parser of transformers.

A tokenizer that has a `response_template` of its own needs none of these. The arguments of a call
are left as text where they are JSON, so that a model's mistake ends in the answer, not in an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
