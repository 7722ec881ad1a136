"""What a body asks of the sampler, in our terms."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.bus.wire.validation import check_sampling
from rolloutbus.trainer_adapter.client.asks import OFF_ELSEWHERE, GenerateOptions

NAMES_IN_BODIES = {
    "sampling.max_new_tokens": "max_tokens",
    "sampling.min_new_tokens": "min_tokens",
    "sampling.sampling_seed": "seed",
    "deadline_s": "timeout",
    "session": "session_id",
    "lora": "lora_path",
    "inputs": "input",
    "want.top_logprobs": "top_logprobs",
    "media": "messages",
    "place.session": "session_id",
    "place.policy": "policy",
    "place.versions": "versions",
    "place.priority": "priority",
}
"""Our name of a field -> OpenAI's, or what users of other servers know; others are the same."""


def refusal(field: str, message: str) -> Refused:
    """Returns the error for a wrong value of the body."""
    return Refused(bad_request(field, message))


def unsupported(field: str, message: str) -> Refused:
    """Returns the error for a body that asks for something unsupported."""
    return Refused(Problem("unsupported", message, "not_started", field=field))


def by_body(problem: Problem, form_field: str = "") -> Problem:
    """The same problem under the field's name in the body; `form_field` asks for the grammar."""
    field = NAMES_IN_BODIES.get(problem.field, problem.field.removeprefix("sampling."))
    field = form_field if field.partition(".")[0] == "grammar" else field
    return msgspec.structs.replace(problem, field=field)


BodyT = TypeVar("BodyT", bound=msgspec.Struct)
Json = dict[str, Any]

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
"""Fields that change nothing about an answer."""
MAX_SAMPLES = 128
"""Choices of one prompt."""


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed response."""

    include_usage: bool = False
    """A last chunk counts tokens."""


class JsonSchema(msgspec.Struct, frozen=True):
    """JSON schema that an answer must match."""

    schema: Json
    name: str = ""


class ResponseFormat(msgspec.Struct, frozen=True):
    """What form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of requests have. None: as if it were absent."""

    model: str = ""
    """Returned in the answer; `policy` and `lora_path` choose the weights."""
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
    no_stop_trim: bool | None = None
    """The text keeps its stop text, which OpenAI's answers do not have."""
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    """Of the prompt and of each choice."""
    return_tokens_as_token_ids: bool | None = None
    """Logprobs tell each token as `token_id:N`, where several tokens may have the same text."""
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
    for name in fields:
        if name not in kind.__struct_encode_fields__ and name not in IGNORED:
            near = nearest(name, kind.__struct_encode_fields__)
            hint = f"did you mean {near!r}?" if near else "leave it out"
            raise unsupported(name, f"there is no field {name[:64]!r} here; {hint}")
    if isinstance(body, Body) and body.n is not None and not 1 <= body.n <= MAX_SAMPLES:
        raise refusal("n", f"n is {body.n}; it must be from 1 to {MAX_SAMPLES}")
    return body


ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "n": (None, 1),
    "stream": (None, False),
    "stream_options": (None,),
    "suffix": (None, ""),
}
"""Fields of a completion that say nothing of how tokens are drawn -> what may be said of each."""
N_TOLD = 1
"""vLLM's logprobs of 0 and 1 both tell the sampled token's."""


def sampling_body(fields: Mapping[str, Any]) -> CompletionBody:
    """A completion's fields where prompts and samples are token ids of a trainer's framework.

    Raises:
        Refused: as `body_of`, and for what is asked of a text or of several samples.
    """
    body = body_of({**fields, "prompt": ()}, CompletionBody)
    for name, values in ASKS_FOR_NOTHING.items():
        if getattr(body, name) not in values:
            raise unsupported(name, f"{name} says nothing of how tokens are drawn; leave it out")
    if (body.logprobs or 0) > N_TOLD:
        raise unsupported("logprobs", "the sampled token's alone are told: 0 or 1")
    return body


def texts_in(given: str | list[str] | None) -> list[str]:
    """One text or several, as a list."""
    return [given] if isinstance(given, str) else list(given or ())


def trimmed_stops_of(body: Body) -> list[str]:
    """The stop texts that are left out of an answer's text."""
    return [] if body.no_stop_trim else texts_in(body.stop)


def _told(error: msgspec.ValidationError) -> tuple[str, str]:
    """Returns (field, sentence) of a msgspec error: `... - at `$.n``, or a missing field."""
    sentence, _, place = str(error).partition(" - at `$")
    field = place.strip("`. ")
    if "missing required field" in sentence:
        return sentence.split("`")[1], sentence
    return field, f"{field}: {sentence}" if field else sentence


T = TypeVar("T")

ANY_TOKEN = 2**31 - 1
"""Only the worker knows its vocabulary."""


def sampling_of(body: Body, default_max_tokens: int) -> SamplingParams:
    """The sampling parameters of a body.

    Raises:
        Refused: a value is out of range; `.field` names it as the body does.
    """
    sampling = SamplingParams(
        max_new_tokens=_or(_max_tokens(body), default_max_tokens),
        min_new_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=0 if body.top_k == OFF_ELSEWHERE else _or(body.top_k, 0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        sampling_seed=body.seed,
        stop_token_ids=_or(body.stop_token_ids, []),
        ignore_eos=bool(body.ignore_eos),
        stop=texts_in(body.stop),
        stop_regex=texts_in(body.stop_regex),
        logit_bias=_biases(body),
        no_stop_trim=bool(body.no_stop_trim),
    )
    problem = check_sampling(sampling, ANY_TOKEN)
    if problem is not None:
        raise Refused(by_body(problem))
    return sampling


def options_of(body: Body) -> GenerateOptions:
    """Where and with what weights a body wants to be sampled."""
    options: GenerateOptions = {}
    if body.session_id is not None:
        options["session"] = body.session_id
    if body.policy is not None:
        options["policy"] = body.policy
    if body.versions is not None:
        options["versions"] = body.versions
    if body.lora_path is not None:
        options["lora"] = body.lora_path
    if body.priority is not None:
        options["priority"] = body.priority
    if body.timeout is not None:
        options["deadline_s"] = body.timeout
    return options


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _max_tokens(body: Body) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return body.max_tokens if newer is None else newer


def _biases(body: Body) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise refusal("logit_bias", "its keys are token ids") from error
