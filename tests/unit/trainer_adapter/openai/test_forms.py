"""Forms of answers: what a body asks for becomes a grammar, and forced calls are read from it."""

import json
from typing import Any

import pytest

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import Grammar
from rolloutbus.trainer_adapter.openai.answer_reader import AnswerPiece, Call
from rolloutbus.trainer_adapter.openai.bodies import ChatBody, body_of
from rolloutbus.trainer_adapter.openai.forms import ForcedCalls, Form, form_of

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}}
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "look", "parameters": {**CITY, "$defs": {"City": {"enum": ["Rome"]}}}}},
    {"function": {"name": "stop"}},
]
CALLS: list[dict[str, Any]] = [
    {"name": "look", "arguments": {"city": "Rome"}},
    {"name": "stop", "arguments": {}},
]


def form(**fields: Any) -> Form | None:  # noqa: ANN401 - fields of a body
    return form_of(body_of({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatBody))


def schema(**fields: Any) -> Any:  # noqa: ANN401 - JSON
    found = form(tools=TOOLS, **fields)
    assert found is not None
    assert (found.field, found.grammar.kind, found.is_calls) == ("tool_choice", "json_schema", True)
    return json.loads(found.grammar.text)


def test_answer_has_the_one_form_that_is_asked_for() -> None:
    array = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    expected = Form("response_format", Grammar("json_schema", '{"type": "array"}'))
    assert form(response_format=array) == expected
    assert form(ebnf="root ::= 'a'") == Form("ebnf", Grammar("ebnf", "root ::= 'a'"))
    assert form(response_format={"type": "text"}, tools=TOOLS, tool_choice="auto") is None


def test_required_call_may_be_of_any_tool_and_of_several() -> None:
    told = schema(tool_choice="required")
    names = [each["properties"]["name"] for each in told["items"]["anyOf"]]
    assert names == [{"const": "look"}, {"const": "stop"}]
    assert (told["minItems"], told.get("maxItems")) == (1, None)
    assert told["$defs"] == {"City": {"enum": ["Rome"]}}, "where its $ref finds it"
    assert schema(tool_choice="required", parallel_tool_calls=False)["maxItems"] == 1


def test_named_function_is_called_once() -> None:
    for choice in (
        {"type": "function", "function": {"name": "stop"}},
        {"type": "function", "name": "stop"},
    ):
        told = schema(tool_choice=choice)
        assert told["items"]["properties"]["name"] == {"const": "stop"}
        assert told["maxItems"] == 1


OTHER_CITY: dict[str, Any] = {"function": {"name": "go", "parameters": {"$defs": {"City": {}}}}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "lok"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a+"}, "tool_choice"),
        (
            {"tools": [*TOOLS, OTHER_CITY], "tool_choice": "required"},
            "tools[2].function.parameters.$defs.City",
        ),
        (
            {"tools": [{"function": {"name": "go", "parameters": {"$defs": 5}}}]}
            | {"tool_choice": "required"},
            "tools[0].function.parameters.$defs",
        ),
        ({"response_format": {"type": "json_object"}, "regex": "a+"}, "regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_form_that_cannot_be_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        form(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_forced_calls_are_read_whatever_pieces_they_come_in(size: int) -> None:
    text = json.dumps(CALLS, indent=1)
    reader = ForcedCalls()
    found = [each for at in range(0, len(text), size) for each in reader.feed(text[at : at + size])]
    assert [*found, *reader.end()] == [Call("look", '{"city": "Rome"}'), Call("stop", "{}")]


def test_forced_call_that_was_cut_off_is_content() -> None:
    reader = ForcedCalls()
    found = reader.feed(json.dumps(CALLS)[:-5])
    assert found == [Call("look", '{"city": "Rome"}')]
    [rest] = reader.end()
    assert isinstance(rest, AnswerPiece)
    assert '"stop"' in rest.text
