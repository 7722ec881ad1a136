"""SGLang's `/generate`: its body as requests of the bus, and rollouts as its replies."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np

from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Grammar, SamplingParams, Want
from rolloutbus.gateway.exchange import Json, converted
from rolloutbus.gateway.problems import with_field_of
from rolloutbus.gateway.samples import options_in
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.client.text import (
    Decode,
    TextPieces,
    Tokenizer,
    text_until_stop,
    trimmed_stops,
)

TokenIds = list[int]
MAX_SAMPLES = 128
"""Of one prompt."""
GRAMMARS: tuple[Literal["json_schema", "regex", "ebnf"], ...] = ("json_schema", "regex", "ebnf")
"""Fields of `sampling_params`, each with the name of its kind of grammar."""
NAMES_IN_BODY = {
    "prompt": "input_ids",
    "session": "session_id",
    "lora": "lora_path",
    "deadline_s": "timeout",
    "want.top_logprobs": "top_logprobs_num",
    "grammar": "sampling_params",
    "sampling.seed": "sampling_params.sampling_seed",
}
"""Name of a field on the bus -> in the body, where they differ by more than where they stand."""
IGNORED = frozenset({"log_metrics", "return_text_in_logprobs", "model"})
"""Fields that change nothing about the samples."""
OFF: Mapping[str, tuple[object, ...]] = {
    "token_ids_logprob": (),
    "token_ids_logprob_positions": (),
    "return_hidden_states": (),
    "return_indexer_topk": (),
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
    "extra_key": (),
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
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """From which token of the prompt on logprobs are wanted; -1: from none."""
    top_logprobs_num: Annotated[int, msgspec.Meta(ge=0)] | None = None
    return_routed_experts: bool | None = None
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


class CustomParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`custom_params` of slime: what it asks of its SGLang beyond others'."""

    return_top_p_token_ids: bool = False
    """The support that each token was sampled from."""


class GenerateSampling(SamplingParams, frozen=True, kw_only=True):
    """`sampling_params`: how tokens are drawn, and what else SGLang has there."""

    sampling_seed: int | None = msgspec.field(name="sampling_seed", default=None)
    """The bus has it on the wire by another name."""
    max_new_tokens: int = 128
    """0: the prompt's logprobs alone are wanted."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    custom_params: CustomParams | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class Prompts(msgspec.Struct, frozen=True):
    """What a body wants sampled."""

    tokens: list[TokenIds]
    n: int
    """Samples of each."""
    is_batch: bool
    """The reply is a list."""
    sampling: SamplingParams
    is_scored_only: bool
    """The prompt's logprobs are wanted, and no sample."""
    options: GenerateOptions
    skip_special: bool
    names: list[str]
    """The caller's names, one for each prompt, or none."""

    def name_of(self, row: int) -> str:
        """What the caller calls a sample; empty: nothing."""
        return self.names[row // self.n] if self.names else ""


def generate_body(fields: Json) -> GenerateBody:
    """Check a body's fields.

    Raises:
        Refused: a field is unknown or of another type; `.field` names it.
    """
    for name in OFF:
        value = fields.get(name)
        if value and value not in OFF[name]:
            message = f"{name} is not served over HTTP; leave it out, or use the client of the bus"
            raise Refused(Problem("unsupported", message, "not_started", field=name))
    asked = {name: value for name, value in fields.items() if name not in IGNORED | OFF.keys()}
    return converted(asked, GenerateBody)


def prompts_of(
    body: GenerateBody, tokenizer: Tokenizer | None, *, tells_cached: bool = False
) -> Prompts:
    """What to sample.

    Args:
        body: as it was sent.
        tokenizer: None: token ids only.
        tells_cached: engines can tell how much of a prompt they had cached.

    Raises:
        Refused: a value is wrong; `.field` names it.
    """
    given = _sampling_of(body.sampling_params or {})
    options = _options_of(body, given, tells_cached=tells_cached)
    tokens, is_batch = _tokens_of(body, tokenizer)
    is_scored_only = given.max_new_tokens == 0 and _scored_from(body) is not None
    names = [body.rid] if isinstance(body.rid, str) else list(body.rid or ())
    if names and len(names) != len(tokens):
        raise Refused(bad_request("rid", f"{len(names)} names for {len(tokens)} prompts"))
    return Prompts(
        tokens=tokens,
        n=given.n,
        is_batch=is_batch or given.n > 1,
        sampling=SamplingParams(
            **{name: getattr(given, name) for name in SamplingParams.__struct_fields__}
            | ({"max_new_tokens": 1} if is_scored_only else {})
        ),
        is_scored_only=is_scored_only,
        options=options,
        skip_special=given.skip_special_tokens,
        names=names,
    )


def reply_of(
    rollout: Rollout, body: GenerateBody, prompts: Prompts, tokenizer: Tokenizer | None, row: int
) -> Json:
    """One sample, in SGLang's shape."""
    tokens = [] if prompts.is_scored_only else rollout.tokens.tolist()
    meta: Json = {
        "id": prompts.name_of(row) or rollout.rid,
        "finish_reason": _finish_of(rollout, len(tokens)),
        "prompt_tokens": rollout.n_prompt_tokens,
        "completion_tokens": len(tokens),
        "weight_versions": [list(run) for run in rollout.version_runs],
        "worker": rollout.worker,
        "e2e_latency": (rollout.queue_ms + rollout.run_ms) / 1e3,
    }
    if rollout.lora:
        meta["lora"] = rollout.lora
    if body.return_logprob:
        n = len(tokens)
        meta["output_token_logprobs"] = pairs_of(rollout.logprobs[:n], tokens)
        meta["output_token_behaviour_logprobs"] = pairs_of(rollout.behaviour_logprobs[:n], tokens)
        if body.top_logprobs_num:
            meta["output_top_logprobs"] = list(_likeliest(rollout))[:n]
    meta |= _told_of_prompt(rollout, body, prompts.tokens[row // prompts.n])
    meta |= _told_of_engine(rollout)
    reply: Json = {"output_ids": tokens, "meta_info": meta}
    if tokenizer is None:
        return reply
    stop, least = trimmed_stops(prompts.sampling), prompts.sampling.min_new_tokens
    return {"text": text_until_stop(_decode(prompts, tokenizer), tokens, stop, least), **reply}


def pieces_of(prompts: Prompts, tokenizer: Tokenizer) -> TextPieces:
    """Makes the text of a sample while it grows."""
    sampling = prompts.sampling
    decode = _decode(prompts, tokenizer)
    return TextPieces(decode, trimmed_stops(sampling), sampling.min_new_tokens)


def _decode(prompts: Prompts, tokenizer: Tokenizer) -> Decode:
    return partial(tokenizer.decode, skip_special_tokens=prompts.skip_special)


def by_body(error: BusError) -> BusError:
    """The same error; a wrong field has its name in the body."""
    return with_field_of(NAMES_IN_BODY, error)


def _options_of(
    body: GenerateBody, given: GenerateSampling, *, tells_cached: bool
) -> GenerateOptions:
    options = options_in(body)
    scored_from = _scored_from(body)
    options["want"] = Want(
        top_logprobs=body.top_logprobs_num or 0,
        prompt_logprobs=scored_from is not None,
        prompt_logprobs_start=scored_from or 0,
        routed_experts=bool(body.return_routed_experts),
        sampling_mask=given.custom_params is not None
        and given.custom_params.return_top_p_token_ids,
        cached_tokens=tells_cached,
    )
    grammars = [
        Grammar(kind, text) for kind in GRAMMARS if (text := getattr(given, kind)) is not None
    ]
    if len(grammars) > 1:
        message = f"an answer has one form; ask for one of {', '.join(GRAMMARS)}"
        raise Refused(bad_request("sampling_params", message))
    for grammar in grammars:
        options["grammar"] = grammar
    return options


def _scored_from(body: GenerateBody) -> int | None:
    """The first token of the prompt whose logprob is wanted; None: none is."""
    start = body.logprob_start_len
    return start if body.return_logprob and start is not None and start >= 0 else None


def _sampling_of(given: Json) -> GenerateSampling:
    fields = {name: value for name, value in given.items() if value is not None}
    for name in ("stop", "stop_regex"):
        if isinstance(fields.get(name), str):
            fields[name] = [fields[name]]
    return converted(fields, GenerateSampling, "sampling_params")


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


def _finish_of(rollout: Rollout, n_tokens: int) -> Json:
    if rollout.finish_reason == "length":
        return {"type": "length", "length": n_tokens}
    return {"type": rollout.finish_reason}


def _told_of_prompt(rollout: Rollout, body: GenerateBody, prompt: TokenIds) -> Json:
    """The logprobs of its tokens, if they were asked for."""
    start, values = _scored_from(body), rollout.arrays.get("prompt_logprobs")
    if start is None or values is None:
        return {}
    told: Json = {"input_token_logprobs": pairs_of(values, prompt[start:])}
    ids = rollout.arrays.get("prompt_top_token_ids")
    likeliest = rollout.arrays.get("prompt_top_logprobs")
    if ids is not None and likeliest is not None:
        rows = zip(likeliest, ids.tolist(), strict=True)
        told["input_top_logprobs"] = [pairs_of(row, some) for row, some in rows]
    return told


def _told_of_engine(rollout: Rollout) -> Json:
    """What engines were asked for besides; arrays are int32 in base64, as SGLang has them."""
    told: Json = {}
    cached = rollout.arrays.get("cached_tokens")
    if cached is not None:
        told["cached_tokens"] = int(cached[0])
    experts = rollout.arrays.get("routed_experts")
    if experts is not None:
        told["routed_experts"] = _in_base64(experts)
    support = rollout.arrays.get("sampling_mask")
    counts = rollout.arrays.get("sampling_mask_counts")
    # Tokens that an earlier attempt sampled are not described: half a support is none.
    if support is not None and counts is not None and len(counts) == len(rollout.tokens):
        told["top_p_token_ids"] = _in_base64(support)
        told["top_p_token_offsets"] = _in_base64(np.cumsum([0, *counts]))
    return told


def _in_base64(values: "np.ndarray[Any, Any]") -> str:
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


def pairs_of(values: "np.ndarray[Any, Any]", tokens: Sequence[int]) -> list[list[Any]]:
    """`[logprob, token, None]` for each token; a logprob that is none is null."""
    finite = [value if np.isfinite(value) else None for value in values.tolist()]
    return [[value, token, None] for value, token in zip(finite, tokens, strict=True)]


def _likeliest(rollout: Rollout) -> Iterator[list[list[Any]] | None]:
    """Of each token; None for those kept from an earlier attempt."""
    ids, values = rollout.arrays.get("top_token_ids"), rollout.arrays.get("top_logprobs")
    rows = 0 if ids is None or values is None else len(ids)
    yield from [None] * (len(rollout.tokens) - rows)
    if ids is not None and values is not None:
        for row, told in zip(values, ids.tolist(), strict=True):
            yield pairs_of(row, told)
