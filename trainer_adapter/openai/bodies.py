"""The bodies of requests, typed: OpenAI's fields, and those that RL users of other servers know."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec

from rolloutbus.trainer_adapter.openai.refusals import refusal, unsupported

BodyT = TypeVar("BodyT", bound="Body")
Json = dict[str, Any]

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
"""Fields that change nothing about an answer."""
MAX_SAMPLES = 128
"""Choices of one prompt."""


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream is told."""

    include_usage: bool = False
    """A last chunk counts tokens."""


class JsonSchema(msgspec.Struct, frozen=True):
    """What an answer must be."""

    schema: Json
    name: str = ""


class ResponseFormat(msgspec.Struct, frozen=True):
    """What form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of requests have. None: as if it were absent."""

    model: str = ""
    """Told back; whose weights sample is said by `policy` and `lora_path`."""
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    regex: str | None = None
    ebnf: str | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    """Of the prompt and of each choice."""
    session_id: str | None = None
    policy: str | None = None
    versions: str | None = None
    """`any`, `latest`, `min:V`, `exact:V` or `max-staleness:K`."""
    lora_path: str | None = None
    """Name of an adapter, or `NAME@VERSION`."""
    priority: int | None = None
    timeout: float | None = None
    """Seconds from now for the whole request."""


class ChatBody(Body, frozen=True, kw_only=True):
    """Of a chat completion."""

    messages: list[Json]
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    """For the model's chat template, e.g. `enable_thinking`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionBody(Body, frozen=True, kw_only=True):
    """Of a completion."""

    prompt: Any
    """Text, token ids, or a list of either."""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


def body_of(payload: Mapping[str, Any], kind: type[BodyT]) -> BodyT:
    """The body of a request, or of `{"json": body, "headers": …}`.

    Raises:
        Refused: a field is missing, unknown or of another type; `.field` names it.
    """
    fields = payload
    if "json" in payload and payload.keys() <= {"json", "headers"}:
        fields = cast("Mapping[str, Any]", payload["json"])
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise refusal(*_told(error)) from error
    known = {field.encode_name for field in msgspec.structs.fields(kind)} | IGNORED
    for name in fields:
        if name not in known:
            raise unsupported(name, f"there is no field {name[:64]!r} here; leave it out")
    if body.n is not None and not 1 <= body.n <= MAX_SAMPLES:
        raise refusal("n", f"n is {body.n}; it must be from 1 to {MAX_SAMPLES}")
    return body


def texts_in(given: str | list[str] | None) -> list[str]:
    """One text or several, as a list."""
    return [given] if isinstance(given, str) else list(given or ())


def _told(error: msgspec.ValidationError) -> tuple[str, str]:
    """(field, sentence) of msgspec's `... - at `$.n``, or of a field that is missing."""
    sentence, _, place = str(error).partition(" - at `$")
    field = place.strip("`. ")
    if "missing required field" in sentence:
        field = sentence.split("`")[1]
    return field, sentence
