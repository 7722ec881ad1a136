"""The form that an answer must have: JSON, a pattern, a grammar, or calls of certain tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rolloutbus.bus.wire.messages.generation import Grammar
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.openai.answer_reader import AnswerPiece, Call, call_in
from rolloutbus.trainer_adapter.openai.bodies import Body, ChatBody, Json, refusal, unsupported

CHOICES = "`auto`, `none`, `required` or a function"


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar, and the field of the body that asks for it."""

    field: str
    grammar: Grammar

    @property
    def is_calls(self) -> bool:
        """The answer is nothing but tool calls."""
        return self.field == "tool_choice"


def form_of(body: Body) -> Form | None:
    """The form that a body asks for; None: any.

    Raises:
        Refused: it asks for two, or for calls of tools that there are not.
    """
    found: list[Form] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(_schema("response_format", {"type": "object"}))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise refusal("response_format.json_schema", "the schema is missing")
        found.append(_schema("response_format", form.json_schema.schema))
    if body.regex is not None:
        found.append(Form("regex", Grammar("regex", body.regex)))
    if body.ebnf is not None:
        found.append(Form("ebnf", Grammar("ebnf", body.ebnf)))
    schema = _forced_calls(body) if isinstance(body, ChatBody) else None
    if schema is not None:
        found.append(_schema("tool_choice", schema))
    if len(found) > 1:
        fields = " and ".join(each.field for each in found)
        raise refusal(found[-1].field, f"an answer has one form, and {fields} ask for one each")
    return found[0] if found else None


def grammar_of(form: Form | None) -> GenerateOptions:
    """The option of a request that asks for a form."""
    return {} if form is None else {"grammar": form.grammar}


def _schema(field: str, schema: Json) -> Form:
    return Form(field, Grammar("json_schema", json.dumps(schema, ensure_ascii=False)))


def _forced_calls(body: ChatBody) -> Json | None:
    """JSON schema of a list of calls; None: a call is not forced."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    tools = body.tools or []
    if not tools:
        raise refusal("tool_choice", "a call is forced, and `tools` names none to call")
    is_one = body.parallel_tool_calls is False
    if choice != "required":
        tools, is_one = [_tool_named(_name_in(choice), tools)], True
    definitions: Json = {}
    calls = [_call_schema(tool, index, definitions) for index, tool in enumerate(tools)]
    schema: Json = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if len(calls) == 1:
        schema["items"] = calls[0]
    if is_one:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _name_in(choice: str | Json) -> str:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise unsupported("tool_choice", f"{str(choice)[:64]!r} is none of {CHOICES}")
    # Older bodies have the name where newer ones have the function.
    function = choice.get("function", choice)
    name = cast("Json", function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refusal("tool_choice.function.name", "the name of a function is missing")
    return name


def _tool_named(name: str, tools: Sequence[Json]) -> Json:
    known = [str(tool["function"]["name"]) for tool in tools]
    if name not in known:
        there = f"`tools` has {', '.join(known)}"
        raise refusal("tool_choice.function.name", f"there is no {name[:64]!r}; {there}")
    return tools[known.index(name)]


def _call_schema(tool: Json, index: int, definitions: Json) -> Json:
    """Schema of one call; what its parameters define is named for all, since `$ref` is absolute."""
    function = tool["function"]
    parameters: Any = function.get("parameters") or {"type": "object"}
    path = f"tools[{index}].function.parameters"
    if not isinstance(parameters, dict):
        raise refusal(path, "parameters are a JSON schema, an object")
    own = {**cast("Json", parameters)}
    defined: Any = own.pop("$defs", None) or {}
    if not isinstance(defined, dict):
        raise refusal(f"{path}.$defs", "definitions are an object, a schema by each name")
    for name, schema in cast("Json", defined).items():
        if definitions.setdefault(name, schema) != schema:
            raise refusal(f"{path}.$defs.{name}", "another tool defines it otherwise; rename it")
    properties: Json = {"name": {"const": function["name"]}, "arguments": own}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class ForcedCalls:
    """Reads an answer that is a list of calls; each is told when it is whole."""

    def __init__(self) -> None:
        self._unread = ""
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> list[AnswerPiece | Call]:
        """The text goes on."""
        self._unread += text
        found: list[AnswerPiece | Call] = []
        while True:
            rest = self._unread.lstrip(" \t\r\n[,")
            try:
                told, end = self._decoder.raw_decode(rest)
                found.append(call_in(cast("Mapping[str, Any]", told)))
            except (ValueError, TypeError, KeyError, AttributeError):
                return found
            self._unread = rest[end:]

    def end(self) -> list[AnswerPiece | Call]:
        """There is no more text: a call that was cut off is content."""
        rest, self._unread = self._unread, ""
        is_over = not rest.strip(" \t\r\n[,]")
        return [] if is_over else [AnswerPiece("content", rest)]
