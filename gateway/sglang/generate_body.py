"""SGLang's `/generate`: its body as requests of the bus, and rollouts as its replies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np

from rolloutbus.bus.wire.errors import BusError, EngineFailed, Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Grammar, SamplingParams, Want
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.gateway.exchange import Json
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.client.text import Tokenizer

TokenIds = list[int]
MAX_SAMPLES = 128
"""Of one prompt."""
GRAMMARS: Mapping[str, Literal["json_schema", "regex", "ebnf"]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
}
"""Field of `sampling_params` -> kind of grammar."""
SAME = {
    field.name for field in msgspec.structs.fields(SamplingParams) if field.name != "sampling_seed"
} | {"sampling_seed"}
"""Fields of `sampling_params` that the bus has under the same names."""
ABOUT_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
NAMES = [*SAME, *GRAMMARS, *ABOUT_TEXT, "n"]
NAMES_IN_BODY = {
    "prompt": "input_ids",
    "session": "session_id",
    "lora": "lora_path",
    "deadline_s": "timeout",
    "want.top_logprobs": "top_logprobs_num",
    "grammar": "sampling_params",
}
"""Name of a field on the bus -> in the body, where they differ by more than where they stand."""
IGNORED = frozenset({"log_metrics", "return_text_in_logprobs", "model"})
"""Fields that change nothing about the samples."""
OFF: Mapping[str, tuple[object, ...]] = {
    "logprob_start_len": (-1,),
    "token_ids_logprob": (),
    "return_hidden_states": (),
    "return_routed_experts": (),
    "return_sampling_mask": (),
    "return_bytes": (),
    "custom_logit_processor": (),
    "session_params": (),
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "modalities": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "lora_id": (),
    "routed_dp_rank": (),
    "data_parallel_rank": (),
}
"""SGLang's fields that are not served here -> values that ask for nothing, besides None, false and
empty ones; programs send them always."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/generate`. None: as if it were absent."""

    text: str | list[str] | None = None
    input_ids: list[int | TokenIds] | None = None
    """Of one prompt, or of several."""
    sampling_params: Json | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stream: bool = False
    rid: str | list[str] | None = None
    """How `/abort_request` names it; a list has one for each prompt."""
    lora_path: str | None = None
    session_id: str | None = None
    priority: int | None = None
    policy: str | None = None
    versions: str | None = None
    """`any`, `latest`, `min:V`, `exact:V` or `max-staleness:K`."""
    timeout: float | None = None
    """Seconds from now for the whole request."""


class Prompts(msgspec.Struct, frozen=True):
    """What a body wants sampled."""

    tokens: list[TokenIds]
    n: int
    """Samples of each."""
    is_batch: bool
    """The reply is a list."""
    sampling: SamplingParams
    options: GenerateOptions
    skip_special: bool
    names: list[str]
    """The caller's names, one for each prompt, or none."""


def generate_body(fields: Json) -> GenerateBody:
    """Check a body's fields.

    Raises:
        Refused: a field is unknown or of another type; `.field` names it.
    """
    known = [field.name for field in msgspec.structs.fields(GenerateBody)]
    for name in fields:
        if name in OFF and (not fields[name] or fields[name] in OFF[name]):
            continue
        if name in OFF:
            message = f"{name} is not served over HTTP; leave it out, or use the client of the bus"
            raise Refused(Problem("unsupported", message, "not_started", field=name))
        if name not in known and name not in IGNORED:
            raise Refused(_unknown(name[:64], nearest(name, known), name[:64]))
    try:
        return msgspec.convert(fields, GenerateBody)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at `$.")
        raise Refused(bad_request(place.rstrip("`") or "body", sentence)) from error


def prompts_of(body: GenerateBody, tokenizer: Tokenizer | None) -> Prompts:
    """What to sample.

    Raises:
        Refused: a value is wrong; `.field` names it.
    """
    given = dict(body.sampling_params or {})
    for name in given:
        if name not in NAMES:
            field = f"sampling_params.{name[:64]}"
            raise Refused(_unknown(field, nearest(name, NAMES), name[:64]))
    n = given.pop("n", 1)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_SAMPLES:
        message = f"n is {n!r}; it must be from 1 to {MAX_SAMPLES}"
        raise Refused(bad_request("sampling_params.n", message))
    skip_special = bool(given.pop("skip_special_tokens", True))
    for name in ABOUT_TEXT[1:]:
        given.pop(name, None)
    options = _options_of(body, given)
    tokens, is_batch = _tokens_of(body, tokenizer)
    names = [body.rid] if isinstance(body.rid, str) else list(body.rid or ())
    if names and len(names) != len(tokens):
        raise Refused(bad_request("rid", f"{len(names)} names for {len(tokens)} prompts"))
    return Prompts(
        tokens=tokens,
        n=n,
        is_batch=is_batch or n > 1,
        sampling=_sampling_of(given),
        options=options,
        skip_special=skip_special,
        names=names,
    )


def reply_of(
    rollout: Rollout, body: GenerateBody, prompts: Prompts, tokenizer: Tokenizer | None, name: str
) -> Json:
    """One sample, in SGLang's shape."""
    tokens = rollout.tokens.tolist()
    meta: Json = {
        "id": name or rollout.rid,
        "finish_reason": _finish_of(rollout),
        "prompt_tokens": rollout.n_prompt_tokens,
        "completion_tokens": len(tokens),
        "weight_version": str(rollout.version_runs[-1][0]) if rollout.version_runs else None,
        "weight_versions": [list(run) for run in rollout.version_runs],
        "worker": rollout.worker,
        "e2e_latency": (rollout.queue_ms + rollout.run_ms) / 1e3,
    }
    if rollout.lora:
        meta["lora"] = rollout.lora
    if body.return_logprob:
        meta["output_token_logprobs"] = _pairs(rollout.logprobs, tokens)
        meta["output_token_behaviour_logprobs"] = _pairs(rollout.behaviour_logprobs, tokens)
        if body.top_logprobs_num:
            meta["output_top_logprobs"] = list(_likeliest(rollout))
    reply: Json = {"output_ids": tokens, "meta_info": meta}
    if tokenizer is not None:
        text = tokenizer.decode(tokens, skip_special_tokens=prompts.skip_special)
        reply = {"text": str(text), **reply}
    return reply


def by_body(error: BusError) -> BusError:
    """The same error; a wrong field has its name in the body."""
    if not isinstance(error, Refused | EngineFailed):
        return error
    field = error.field.removeprefix("place.")
    part, dot, rest = field.partition(".")
    if part == "sampling":
        field = f"sampling_params{dot}{'sampling_seed' if rest == 'seed' else rest}"
    field = NAMES_IN_BODY.get(field, field)
    if field == error.field:
        return error
    problem = msgspec.structs.replace(error.problem, field=field)
    return type(error)(problem, rid=error.rid)


def _unknown(field: str, near: str, name: str) -> Problem:
    hint = f"did you mean {near!r}?" if near else "leave it out"
    return Problem("unsupported", f"there is no field {name!r} here; {hint}", "not_started", field)


def _options_of(body: GenerateBody, given: Json) -> GenerateOptions:
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
    if body.top_logprobs_num:
        options["want"] = Want(top_logprobs=body.top_logprobs_num)
    wanted = {name: given.pop(name, None) for name in GRAMMARS}
    texts = {name: text for name, text in wanted.items() if text is not None}
    if len(texts) > 1:
        message = f"an answer has one form; ask for one of {', '.join(texts)}"
        raise Refused(bad_request("sampling_params", message))
    for name, text in texts.items():
        if not isinstance(text, str):
            raise Refused(bad_request(f"sampling_params.{name}", "a grammar is a text"))
        options["grammar"] = Grammar(GRAMMARS[name], text)
    return options


def _sampling_of(given: Json) -> SamplingParams:
    fields = {name: value for name, value in given.items() if value is not None}
    if "sampling_seed" in fields:
        fields["seed"] = fields.pop("sampling_seed")
    for name in ("stop", "stop_regex"):
        if isinstance(fields.get(name), str):
            fields[name] = [fields[name]]
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        sentence, _, place = str(error).partition(" - at `$.")
        field = f"sampling_params.{place.rstrip('`')}".rstrip(".")
        raise Refused(bad_request(field, sentence)) from error


def _tokens_of(body: GenerateBody, tokenizer: Tokenizer | None) -> tuple[list[TokenIds], bool]:
    """The prompts, and whether they came as a list of prompts."""
    if (body.text is None) == (body.input_ids is None):
        raise Refused(bad_request("input_ids", "give either `text` or `input_ids`"))
    if body.input_ids is not None:
        n_lists = sum(isinstance(each, list) for each in body.input_ids)
        if n_lists == 0:
            return [cast("TokenIds", body.input_ids)], False
        if n_lists < len(body.input_ids):
            raise Refused(bad_request("input_ids", "it is a list of ids, or a list of lists"))
        return cast("list[TokenIds]", body.input_ids), True
    if tokenizer is None:
        message = "this gateway has no tokenizer: send `input_ids`, or start it with --tokenizer"
        raise Refused(Problem("unsupported", message, "not_started", field="text"))
    texts = [body.text] if isinstance(body.text, str) else list(body.text or ())
    tokens = [list(tokenizer.encode(text, add_special_tokens=True)) for text in texts]
    return tokens, not isinstance(body.text, str)


def _finish_of(rollout: Rollout) -> Json:
    if rollout.finish_reason == "length":
        return {"type": "length", "length": len(rollout.tokens)}
    return {"type": rollout.finish_reason}


def _pairs(values: "np.ndarray[Any, Any]", tokens: Sequence[int]) -> list[list[Any]]:
    finite = [value if np.isfinite(value) else None for value in values.tolist()]
    return [[value, token, None] for value, token in zip(finite, tokens, strict=True)]


def _likeliest(rollout: Rollout) -> Iterator[list[list[Any]] | None]:
    """Of each token; None for those kept from an earlier attempt."""
    ids, values = rollout.arrays.get("top_token_ids"), rollout.arrays.get("top_logprobs")
    rows = 0 if ids is None or values is None else len(ids)
    yield from [None] * (len(rollout.tokens) - rows)
    if ids is not None and values is not None:
        for row, told in zip(values, ids.tolist(), strict=True):
            yield _pairs(row, told)
