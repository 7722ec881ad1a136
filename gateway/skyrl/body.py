"""The body and the reply of `/inference/v1/generate`, with vLLM's sampling parameters."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import SamplingParams, Want
from rolloutbus.gateway.adapters import LoadBody, UnloadBody
from rolloutbus.gateway.exchange import Json, converted
from rolloutbus.gateway.samples import options_in
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.openai import bodies
from rolloutbus.trainer_adapter.openai.bodies import CompletionBody

MAX_SAMPLES = 128
"""Of one prompt."""
Texts = str | list[str]


class VllmSampling(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's sampling parameters. None: as if it were absent."""

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: Texts | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """So many likeliest tokens in each place besides the sampled one; None: no logprobs at all."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The same for the prompt."""


class VllmBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/inference/v1/generate` and of `/skyrl/v1/generate`."""

    token_ids: list[int]
    sampling_params: Json = {}
    model: str = ""
    priority: int | None = None
    session_id: str | None = None
    versions: str | None = None
    """`any`, `latest`, `min:V`, `exact:V` or `max-staleness:K`."""
    timeout: float | None = None
    """Seconds from now for the whole request."""


class VllmLoadBody(LoadBody, frozen=True, kw_only=True):
    """Body of `/v1/load_lora_adapter`."""

    load_inplace: bool = False
    """It takes the place of one of its name."""


class VllmUnloadBody(UnloadBody, frozen=True, kw_only=True):
    """Body of `/v1/unload_lora_adapter`."""

    lora_int_id: int | None = None
    """vLLM's own number of it, which changes nothing."""


OWN_MEANING = frozenset({"n", "logprobs", "prompt_logprobs", "allowed_token_ids"})
"""Parameters that say nothing of how tokens are drawn."""
ABOUT_TEXT = frozenset(
    {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
    | {"detokenize", "output_kind"}
)
"""Parameters that change nothing about token ids; replies hold nothing else."""


def vllm_body(fields: Json) -> VllmBody:
    """Check a body's fields.

    Raises:
        Refused: a field is unknown or of another type; `.field` names it.
    """
    fields = dict(fields)
    if fields.pop("features", None) is not None:
        message = "images and other media go through /v1/chat/completions, not as features"
        raise Refused(Problem("unsupported", message, "not_started", field="features"))
    if fields.pop("cache_salt", None) is not None:
        message = (
            "a prefix cache is never shared between weight versions here, so no salt is needed; "
            "leave it out (generator.use_cache_salt=false)"
        )
        raise Refused(Problem("unsupported", message, "not_started", field="cache_salt"))
    return converted(fields, VllmBody, "")


def vllm_sampling(given: Json) -> VllmSampling:
    """Check sampling parameters.

    Raises:
        Refused: one is unknown or of another type; `.field` names it.
    """
    known = {name: value for name, value in given.items() if name not in ABOUT_TEXT}
    return converted(known, VllmSampling, "sampling_params")


def sampling_of(vllm: VllmSampling, default_max_tokens: int) -> SamplingParams:
    """The parameters that say how tokens are drawn: a completion's, which has vLLM's names.

    Raises:
        Refused: a value is out of range; `.field` names it.
    """
    given = msgspec.structs.asdict(vllm)
    drawn = {name: value for name, value in given.items() if name not in OWN_MEANING}
    try:
        return bodies.sampling_of(CompletionBody(prompt=(), **drawn), default_max_tokens)
    except Refused as error:
        field = f"sampling_params.{error.field}"
        raise Refused(msgspec.structs.replace(error.problem, field=field)) from error


def options_of(body: VllmBody, vllm: VllmSampling, *, with_experts: bool) -> GenerateOptions:
    """All else that the body asks of the bus, without the model."""
    options = options_in(body)
    options["want"] = Want(
        top_logprobs=max(vllm.logprobs or 0, vllm.prompt_logprobs or 0),
        prompt_logprobs=vllm.prompt_logprobs is not None,
        routed_experts=with_experts,
    )
    if vllm.allowed_token_ids is not None:
        options["action_mask"] = vllm.allowed_token_ids
    return options


def reply_of(rollouts: Sequence[Rollout], body: VllmBody, vllm: VllmSampling) -> Json:
    """The samples of one prompt, in vLLM's shape."""
    prompt = None
    if vllm.prompt_logprobs is not None:
        prompt = _prompt_logprobs(rollouts[0], body.token_ids, vllm.prompt_logprobs)
    return {
        "request_id": rollouts[0].rid,
        "model": body.model,
        "choices": [_choice(index, each, vllm) for index, each in enumerate(rollouts)],
        "prompt_logprobs": prompt,
    }


def _choice(index: int, rollout: Rollout, vllm: VllmSampling) -> Json:
    choice: Json = {
        "index": index,
        "token_ids": rollout.tokens.tolist(),
        "finish_reason": rollout.finish_reason,
        "logprobs": None,
        "weight_versions": [list(run) for run in rollout.version_runs],
        "worker": rollout.worker,
    }
    if vllm.logprobs is not None:
        choice["logprobs"] = {"content": _content(rollout, vllm.logprobs)}
        choice["behaviour_logprobs"] = [_number(each) for each in rollout.behaviour_logprobs]
    experts = rollout.arrays.get("routed_experts")
    if experts is not None:
        choice["routed_experts"] = experts.tolist()
    return choice


def _content(rollout: Rollout, n_top: int) -> list[Json]:
    rows: list[Json] = [
        {"token": f"token_id:{token}", "logprob": _number(value), "top_logprobs": []}
        for token, value in zip(rollout.tokens.tolist(), rollout.logprobs, strict=True)
    ]
    ids, values = rollout.arrays.get("top_token_ids"), rollout.arrays.get("top_logprobs")
    if n_top and ids is not None and values is not None:
        described = rows[len(rows) - len(ids) :]  # not those kept from an earlier attempt
        for row, some_ids, some in zip(described, ids.tolist(), values, strict=True):
            row["top_logprobs"] = [
                {"token": f"token_id:{token}", "logprob": _number(value)}
                for token, value in zip(some_ids[:n_top], some, strict=False)
            ]
    return rows


def _prompt_logprobs(rollout: Rollout, tokens: Sequence[int], n_top: int) -> list[Json | None]:
    """Of each token of the prompt, by token id; None where there is no number."""
    own = rollout.arrays["prompt_logprobs"]
    ids = rollout.arrays.get("prompt_top_token_ids")
    values = rollout.arrays.get("prompt_top_logprobs")
    rows: list[Json | None] = []
    for place, token in enumerate(tokens):
        if not np.isfinite(own[place]):
            rows.append(None)
            continue
        row: Json = {}
        if n_top and ids is not None and values is not None:
            for other, value in zip(ids[place][:n_top].tolist(), values[place], strict=False):
                row[str(other)] = {"logprob": _number(value)}
        row[str(token)] = {"logprob": _number(own[place])}
        rows.append(row)
    return rows


def _number(value: "np.floating[Any]") -> float | None:
    return float(value) if np.isfinite(value) else None
