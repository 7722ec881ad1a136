"""What a body asks of the sampler, in our terms."""

import json
from typing import TypeVar

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import Grammar, SamplingParams
from rolloutbus.bus.wire.validation import check_sampling
from rolloutbus.trainer_adapter.client.rollouts import OFF_ELSEWHERE, GenerateOptions
from rolloutbus.trainer_adapter.openai.bodies import Body, ChatBody, texts_in
from rolloutbus.trainer_adapter.openai.refusals import by_body, refusal

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
    )
    problem = check_sampling(sampling, ANY_TOKEN)
    if problem is not None:
        raise Refused(by_body(problem))
    return sampling


def options_of(body: Body) -> GenerateOptions:
    """Where and with what weights a body wants to be sampled, and in what form."""
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
    grammar = _grammar(body)
    if grammar is not None:
        options["grammar"] = grammar
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


def _grammar(body: Body) -> Grammar | None:
    found: list[Grammar] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(Grammar("json_schema", json.dumps({"type": "object"})))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise refusal("response_format.json_schema", "the schema is missing")
        found.append(Grammar("json_schema", json.dumps(form.json_schema.schema)))
    if body.regex is not None:
        found.append(Grammar("regex", body.regex))
    if body.ebnf is not None:
        found.append(Grammar("ebnf", body.ebnf))
    if len(found) > 1:
        raise refusal("response_format", "an answer has one form; ask for one of them")
    return found[0] if found else None
