"""A piece of work as SGLang's generate request."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import FinishReason, Grammar, SamplingParams
from rolloutbus.bus.wire.validation import truncates
from rolloutbus.engine_worker.engine import EngineFacts, Work
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import (
    NO_RULES,
    Penalties,
    Rules,
    custom_params,
    processor_text,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import COARSE, STREAMED
from rolloutbus.engine_worker.engines.shared.processors import Processors
from rolloutbus.engine_worker.engines.shared.texts import compiled

MakeRequest = Callable[..., object]
ONLY_THE_LIKELIEST = 1e-9
"""A top_p that leaves one token. With a top_k of 1 SGLang takes a request for greedy and, alone in
its batch, does not divide its logits by the temperature."""


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What an engine's requests have in common."""

    facts: EngineFacts
    processors: Processors
    chance: random.Random
    """Of seeds for requests without one."""
    has_seeds: bool = False
    has_priorities: bool = False
    has_sessions: bool = False
    is_speculative: bool = False
    """Several tokens are sampled in a step: our rules are not asked for each."""
    n_replicas: int = 1
    """SGLang shares requests out among them."""


class Unfit(Exception):
    """The request cannot be run; nothing was started."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def engine_rid(number: int, *, is_streamed: bool) -> str:
    """SGLang's id of a request: 18 characters, none the beginning of another one.

    SGLang aborts by prefix; its scheduler tap reads the first letter.
    """
    return f"{STREAMED if is_streamed else COARSE}{number:016x}."


def n_kept(work: Work) -> int:
    """Tokens that it has from earlier attempts."""
    return len(work.prefix.tokens) // 4 if work.prefix else 0


def end_of_kept(work: Work, facts: EngineFacts) -> FinishReason | None:
    """Why the tokens that it has from earlier attempts are all of it; None: it goes on.

    Stop texts are not looked for: the scheduler knows of them.
    """
    s, n = work.sampling, n_kept(work)
    if work.prefix is not None and n > s.min_new_tokens:
        (last,) = struct.unpack("<i", work.prefix.tokens[-4:])
        if last in _end_ids(s, facts):
            return "stop"
    return "length" if n >= s.max_new_tokens else None


def sampling_params(work: Work, terms: RequestTerms) -> dict[str, object]:
    """SGLang's sampling parameters, each of exactly the type that it wants."""
    s, vocab_size = work.sampling, terms.facts.vocab_size
    params: dict[str, object] = {
        "max_new_tokens": int(s.max_new_tokens) - n_kept(work),
        "temperature": float(s.temperature),
        "top_p": float(s.top_p),
        "top_k": int(s.top_k) if 0 < s.top_k < vocab_size else -1,
        "min_p": float(s.min_p),
        "ignore_eos": bool(s.ignore_eos),
    }
    if s.top_k == 1 and s.temperature > 0:
        params |= {"top_k": -1, "top_p": ONLY_THE_LIKELIEST}
    if s.stop_token_ids:
        params["stop_token_ids"] = [int(token) for token in s.stop_token_ids]
    if s.logit_bias:
        params["logit_bias"] = {str(token): float(value) for token, value in s.logit_bias.items()}
    if work.grammar is not None:
        params[_grammar_name(work.grammar)] = str(work.grammar.text)
    if terms.has_seeds:
        seed = terms.chance.getrandbits(63) if s.sampling_seed is None else s.sampling_seed
        params["sampling_seed"] = int(seed)
    return params


def rules_of(work: Work, terms: RequestTerms) -> Rules:
    """What SGLang is not asked for, since it would get it wrong or cannot do it.

    Raises:
        Unfit: a processor's parameters do not fit, or a pattern is none.
    """
    s, processors = work.sampling, terms.processors
    _check_patterns(s)
    try:
        processors.build(work.processors, terms.facts.vocab_size)
    except ValueError as error:
        raise Unfit(bad_request("processors", str(error))) from error
    return Rules(
        n_kept=n_kept(work),
        stop=tuple(s.stop),
        stop_regex=tuple(s.stop_regex),
        penalties=Penalties(
            float(s.repetition_penalty), float(s.frequency_penalty), float(s.presence_penalty)
        ),
        min_new_tokens=s.min_new_tokens,
        end_ids=_end_ids(s, terms.facts) if s.min_new_tokens else (),
        processors=tuple((processors.path_of(p.name), p.params) for p in work.processors),
        want=work.want,
        seen_with=tuple(input_ids(work)) if work.media else (),
    )


def input_ids(work: Work) -> list[int]:
    """Prompt and the tokens kept from earlier attempts."""
    kept = b"" if work.prefix is None else work.prefix.tokens
    return [*work.prompt.tolist(), *struct.unpack(f"<{len(kept) // 4}i", kept)]


def generate_request(
    work: Work, rid: str, make: MakeRequest, terms: RequestTerms, adapter: str = ""
) -> object:
    """SGLang's `GenerateReqInput` for `work`; `make` is `upstream.request`.

    `adapter`: SGLang's name of the one that it uses; empty: none.

    Raises:
        Unfit: it cannot be run.
    """
    rules = rules_of(work, terms)
    if terms.is_speculative:
        _refuse_what_speculation_hides(work, rules, terms.facts.vocab_size)
    params = sampling_params(work, terms)
    fields = _wishes(work, rules)
    if rules != NO_RULES:
        params["custom_params"] = custom_params(rules)
    if rules.shapes_logits:
        fields["custom_logit_processor"] = processor_text()
    if work.media:
        fields |= _media(work)
    if adapter:
        fields["lora_path"] = adapter
    if terms.has_priorities:
        fields["priority"] = int(work.priority)
    if terms.has_sessions and work.session:
        fields["session_id"] = work.session
    if terms.n_replicas > 1 and work.session:
        # What it has cached is in one replica.
        fields["routed_dp_rank"] = crc32(work.session.encode()) % terms.n_replicas
    return make(
        "GenerateReqInput",
        rid=rid,
        input_ids=input_ids(work),
        sampling_params=params,
        return_logprob=True,
        **fields,
    )


def _wishes(work: Work, rules: Rules) -> dict[str, object]:
    """What SGLang is to tell besides tokens and their logprobs."""
    want = work.want
    # SGLang takes -1, output only, for something else when single ids are asked for.
    start = len(work.prompt) + rules.n_kept if want.logprobs_of else -1
    fields: dict[str, object] = {}
    if want.prompt_logprobs:
        # SGLang does not tell the first one that it is asked for.
        start = max(0, int(want.prompt_logprobs_start) - 1)
    if want.top_logprobs:
        fields["top_logprobs_num"] = int(want.top_logprobs)
    if want.logprobs_of:
        fields["token_ids_logprob"] = [int(token) for token in want.logprobs_of]
    if want.hidden_states:
        fields["return_hidden_states"] = "last" if want.hidden_states == "last" else True
    if want.routed_experts:
        fields["return_routed_experts"] = True
    return {"logprob_start_len": start, **fields}


def _refuse_what_speculation_hides(work: Work, rules: Rules, vocab_size: int) -> None:
    if rules.shapes_logits or truncates(work.sampling, vocab_size):
        why = "penalties, min_new_tokens, processors or what truncation leaves"
        message = f"With speculative decoding this engine has no {why}."
        raise Unfit(Problem("unsupported", message, "not_started", field="sampling"))


def _end_ids(sampling: SamplingParams, facts: EngineFacts) -> tuple[int, ...]:
    eos = () if sampling.ignore_eos else facts.eos_token_ids
    return tuple(sorted({*eos, *sampling.stop_token_ids}))


def _check_patterns(sampling: SamplingParams) -> None:
    for pattern in sampling.stop_regex:
        try:
            compiled(pattern)
        except ValueError as error:
            raise Unfit(bad_request("sampling.stop_regex", str(error))) from error


def _grammar_name(grammar: Grammar) -> str:
    return str(grammar.kind)


def _media(work: Work) -> dict[str, object]:
    """Always bytes: SGLang would open a text as an address or a path."""
    found: dict[str, list[bytes]] = {}
    for each in work.media:
        found.setdefault(f"{each.kind}_data", []).append(bytes(each.data))
    return dict(found)
