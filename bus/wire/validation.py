"""Checks of values that types cannot express: what callers and peers may ask for.

Each check returns the first `Problem` it finds (`bad_request`, not started, with the field and
the limit), or None. Types and unknown fields are the codec's business.
Spec: docs/protocol.md, "Limits".
"""

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.limits import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS_OF,
    MAX_MEDIA,
    MAX_PARAM_ITEMS,
    MAX_PARAMS,
    MAX_PIECE_BYTES,
    MAX_PRIORITY,
    MAX_PROCESSORS,
    MAX_SHORT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEXT_CHARS,
    MAX_TOKENS_BYTES,
)
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Generate,
    Grammar,
    Media,
    Prefix,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.bus.wire.versions import MAX_VERSION, parse_versions

MAX_TOP_LOGPROBS = 64
MAX_BIAS = 1e9
"""What a logit is biased by at most; far from where float32 overflows."""
MAX_GRAMMAR_BYTES = MAX_TEXT_CHARS
"""UTF-8."""
MAX_ADAPTER_CHARS = 40
"""So that with a version it is no longer than other names."""
ADAPTER_NAME = rf"[A-Za-z0-9_-]{{1,{MAX_ADAPTER_CHARS}}}"

_LORA = re.compile(rf"({ADAPTER_NAME})(?:@(0|[1-9][0-9]{{0,19}}))?")


def check_options(body: Generate, vocab_size: int) -> Problem | None:
    """The first wish that no engine of this vocabulary could grant; None if all are possible."""
    wishes = body.lora or body.grammar or body.processors or body.media
    if not wishes and body.want is NOTHING_MORE:  # as most have none, and all are asked
        return None
    return next(_problems(body, vocab_size), None)


def truncates(sampling: SamplingParams, vocab_size: int | None = None) -> bool:
    """Whether tokens are drawn by chance from less than the whole vocabulary.

    Without its size every `top_k` counts.
    """
    is_cut = sampling.top_k > 0 and (vocab_size is None or sampling.top_k < vocab_size)
    cuts = is_cut or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return cuts and sampling.temperature > 0.0


def adapter_of(lora: str) -> tuple[str, int | None] | None:
    """Name and version of `NAME` or `NAME@VERSION`; None if it is neither."""
    found = _LORA.fullmatch(lora)
    if found is None:
        return None
    return found[1], None if found[2] is None else int(found[2])


def is_pinned(lora: str) -> bool:
    """Whether it is a `NAME@VERSION`."""
    named = adapter_of(lora)
    return named is not None and named[1] is not None


def check_tokens_listed(field: str, tokens: Sequence[int], vocab_size: int) -> Problem | None:
    """Token ids that a model of this vocabulary knows."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            return bad_request(field, f"{token} is no token id from 0 to {vocab_size - 1}")
    return None


def list_problems(sampling: SamplingParams, vocab_size: int) -> Iterator[Problem]:
    """Stop texts and logit bias."""
    if not (sampling.stop or sampling.stop_regex or sampling.logit_bias):
        return
    for name, texts in (("stop", sampling.stop), ("stop_regex", sampling.stop_regex)):
        if len(texts) > MAX_STOPS:
            message = f"{len(texts)} texts; at most {MAX_STOPS} are allowed"
            yield bad_request(f"sampling.{name}", message)
        for text in texts:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                message = f"a text of {len(text)} characters; 1 to {MAX_STOP_CHARS} are allowed"
                yield bad_request(f"sampling.{name}", message)
    bias = sampling.logit_bias
    field = "sampling.logit_bias"
    if len(bias) > MAX_LOGIT_BIAS:
        yield bad_request(field, f"{len(bias)} tokens; at most {MAX_LOGIT_BIAS} are allowed")
    problem = check_tokens_listed(field, list(bias), vocab_size)
    if problem is not None:
        yield problem
    for token, value in bias.items():
        if not abs(value) <= MAX_BIAS:
            limit = f"from -{MAX_BIAS:g} to {MAX_BIAS:g}"
            yield bad_request(field, f"the bias of token {token} is {value}; it must be {limit}")


def _problems(body: Generate, vocab_size: int) -> Iterator[Problem]:
    if body.lora and adapter_of(body.lora) is None:
        limit = f"NAME or NAME@VERSION, NAME 1 to {MAX_ADAPTER_CHARS} of A-Z a-z 0-9 _ -"
        yield bad_request("lora", f"{body.lora[:MAX_SHORT_CHARS]!r} is not {limit}")
    if body.prefix is not None and body.lora and not is_pinned(body.lora):
        message = (
            f"{body.lora}: a prefix goes on with the version that sampled it; name NAME@VERSION"
        )
        yield bad_request("lora", message)
    yield from _want_problems(body.want, len(body.prompt) // 4, vocab_size)
    if body.grammar is not None:
        yield from _grammar_problems(body.grammar)
    yield from _processor_problems(body.processors)
    yield from _media_problems(body.media)


def _want_problems(want: Want, n_prompt: int, vocab_size: int) -> Iterator[Problem]:
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    if not 0 <= want.top_logprobs <= most:
        message = f"top_logprobs is {want.top_logprobs}; it must be from 0 to {most}"
        yield bad_request("want.top_logprobs", message)
    if len(want.logprobs_of) > MAX_LOGPROBS_OF:
        message = f"{len(want.logprobs_of)} ids; at most {MAX_LOGPROBS_OF} are allowed"
        yield bad_request("want.logprobs_of", message)
    problem = check_tokens_listed("want.logprobs_of", want.logprobs_of, vocab_size)
    if problem is not None:
        yield problem
    if not 0 <= want.prompt_logprobs_start < max(n_prompt, 1):
        message = f"{want.prompt_logprobs_start} is no index of a prompt of {n_prompt} tokens"
        yield bad_request("want.prompt_logprobs_start", message)
    if want.prompt_logprobs_start and not want.prompt_logprobs:
        message = "it says where prompt_logprobs begin, which are not asked for"
        yield bad_request("want.prompt_logprobs_start", message)


def _grammar_problems(grammar: Grammar) -> Iterator[Problem]:
    size = len(grammar.text.encode(errors="replace"))
    if not 0 < size <= MAX_GRAMMAR_BYTES:
        message = f"a grammar of {size} bytes; 1 to {MAX_GRAMMAR_BYTES} are allowed"
        yield bad_request("grammar.text", message)


def _processor_problems(processors: Sequence[Processor]) -> Iterator[Problem]:
    if len(processors) > MAX_PROCESSORS:
        message = f"{len(processors)} processors; at most {MAX_PROCESSORS} are allowed"
        yield bad_request("processors", message)
    for each in processors:
        if not 0 < len(each.name) <= MAX_SHORT_CHARS:
            message = f"a name of {len(each.name)} characters; 1 to {MAX_SHORT_CHARS} are allowed"
            yield bad_request("processors.name", message)
        if len(each.params) > MAX_PARAMS:
            message = f"{len(each.params)} parameters; at most {MAX_PARAMS} are allowed"
            yield bad_request("processors.params", message)
        for name, value in each.params.items():
            if isinstance(value, list) and len(value) > MAX_PARAM_ITEMS:
                message = f"{name!r} has {len(value)} items; at most {MAX_PARAM_ITEMS} are allowed"
                yield bad_request("processors.params", message)


def _media_problems(media: Sequence[Media]) -> Iterator[Problem]:
    if len(media) > MAX_MEDIA:
        yield bad_request("media", f"{len(media)} media; at most {MAX_MEDIA} are allowed")
    for each in media:
        if not 0 < len(each.data) <= MAX_PIECE_BYTES:
            message = f"{len(each.data)} bytes; 1 to {MAX_PIECE_BYTES} are allowed"
            yield bad_request("media.data", message)


MAX_NAME_BYTES = MAX_SHORT_CHARS
"""Names of actors, policies, sessions and groups."""
MAX_RID_BYTES = MAX_NAME_BYTES + 59
"""A client's name, a slash, and a number below 2**192 in decimal: a counter and 128 random bits."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
"""Below it, and not 0, logits divided by it would overflow."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
MAX_ADDITIVE_PENALTY = 2.0
"""Frequency and presence penalties lie in [-2, 2]."""
MAX_COST = 2**31 - 1
"""Tokens."""
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
COST_FIELD = "place.cost"
TOKEN_BYTES = 4
"""Tokens are int32, logprobs float32, both little endian."""

RID_NUMBER = r"(?:0|[1-9][0-9]{0,57})"
"""Pattern of the n in `<client>/<n>`: canonical decimals, so that two texts are two requests."""

_NAME = re.compile(r"[!-?A-~]+")  # printable ASCII without space and @
_RID = re.compile(r"(?P<client>[!-?A-~]+)/" + RID_NUMBER)


def check_name(name: str, *, field: str = "name") -> Problem | None:
    """A name that may stand in routes, rids and logs.

    `@` is left out because the router names its own commands `<rid>@<member>`.
    """
    if len(name) > MAX_NAME_BYTES or _NAME.fullmatch(name) is None:
        return bad_request(
            field,
            f"{name[:MAX_NAME_BYTES]!r} is no name; use 1 to {MAX_NAME_BYTES} printable ASCII "
            "characters without spaces and @",
        )
    return None


def check_rid(rid: str, *, client: str | None = None) -> Problem | None:
    """A request id `<client>/<n>`; with `client`, one that this client may use."""
    found = _RID.fullmatch(rid) if len(rid) <= MAX_RID_BYTES else None
    if found is None:
        return bad_request(
            "rid",
            f"{rid[:MAX_RID_BYTES]!r} is no request id; use <client>/<n> with a decimal n, "
            f"at most {MAX_RID_BYTES} bytes",
        )
    if client is not None and found["client"] != client:
        return bad_request("rid", f"{rid!r} is not a request of client {client!r}")
    return check_name(found["client"], field="rid")


def check_placement(place: Placement) -> Problem | None:
    """Check the placement that a client asks for."""
    rule = parse_versions(place.versions)
    if isinstance(rule, Problem):
        return rule
    if abs(place.priority) > MAX_PRIORITY:
        return bad_request(
            "place.priority", f"{place.priority} is not in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"
        )
    if not 0 <= place.cost <= MAX_COST:
        return bad_request(COST_FIELD, f"{place.cost} tokens is not in [0, {MAX_COST}]")
    problem = check_name(place.policy, field="place.policy")
    if problem is None and place.session:
        problem = check_name(place.session, field="place.session")
    if problem is None and place.group:
        problem = check_name(place.group, field="place.group")
    if problem is None and place.worker:
        problem = check_name(place.worker, field="place.worker")
        if problem is None and place.session:
            message = "a session says by itself at which worker its requests run; leave one out"
            problem = bad_request("place.worker", message)
    return problem


def cost_of(body: Generate) -> int:
    """Tokens that a request can take: its prompt, and all that it may sample."""
    return len(body.prompt) // TOKEN_BYTES + max(0, min(body.sampling.max_new_tokens, MAX_COST))


def check_cost(place: Placement, body: Generate, *, max_context: int) -> Problem | None:
    """Check the cost in a header against its body: routers do not look into bodies."""
    least = cost_of(body)
    if place.cost < least:
        return bad_request(
            COST_FIELD,
            f"{place.cost} tokens is less than prompt and max_new_tokens together, {least}; "
            "say at least that, or 0 for the router to count",
        )
    if place.cost > max_context:
        return bad_request(
            COST_FIELD, f"{place.cost} tokens is more than this engine takes, {max_context}"
        )
    return None


def check_sampling(sampling: SamplingParams, vocab_size: int) -> Problem | None:
    """Sampling values an engine with `vocab_size` tokens can honour."""
    return next(_sampling_problems(sampling, vocab_size), None)


def _sampling_problems(sampling: SamplingParams, vocab_size: int) -> Iterator[Problem]:
    yield from _number_problems(sampling)
    if sampling.max_new_tokens < 1:
        yield _bad_sampling("max_new_tokens", sampling.max_new_tokens, "at least 1")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        limit = f"from 0 to max_new_tokens, which is {sampling.max_new_tokens}"
        yield _bad_sampling("min_new_tokens", sampling.min_new_tokens, limit)
    if sampling.top_k < 0:
        yield _bad_sampling("top_k", sampling.top_k, "at least 0, which is off")
    if sampling.sampling_seed is not None and not MIN_SEED <= sampling.sampling_seed <= MAX_SEED:
        yield _bad_sampling("sampling_seed", sampling.sampling_seed, "an int64")
    stops = sampling.stop_token_ids
    if len(stops) > MAX_STOP_TOKEN_IDS:
        yield bad_request(
            "sampling.stop_token_ids", f"{len(stops)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    for token in stops:
        if not 0 <= token < vocab_size:
            yield _bad_sampling("stop_token_ids", token, f"a token id from 0 to {vocab_size - 1}")
    yield from list_problems(sampling, vocab_size)


def _number_problems(sampling: SamplingParams) -> Iterator[Problem]:
    """Real-valued parameters; tested for what is right, since NaN fails every comparison."""
    is_greedy = sampling.temperature == 0
    if not is_greedy and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        limit = f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        yield _bad_sampling("temperature", sampling.temperature, limit)
    if not 0 < sampling.top_p <= 1:
        yield _bad_sampling("top_p", sampling.top_p, "above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        yield _bad_sampling("min_p", sampling.min_p, "from 0 to 1")
    if not MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        limit = f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
        yield _bad_sampling("repetition_penalty", sampling.repetition_penalty, limit)
    for name, value in (
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
    ):
        if not abs(value) <= MAX_ADDITIVE_PENALTY:
            limit = f"from -{MAX_ADDITIVE_PENALTY:g} to {MAX_ADDITIVE_PENALTY:g}"
            yield _bad_sampling(name, value, limit)


def check_generate(body: Generate, *, vocab_size: int, max_context: int) -> Problem | None:
    """A `generate` that an engine of this vocabulary and context (tokens) can run."""
    problem = check_tokens("prompt", body.prompt, vocab_size)
    if problem is None and not body.prompt:
        problem = bad_request("prompt", "the prompt is empty; give at least one token")
    problem = problem or check_sampling(body.sampling, vocab_size)
    problem = problem or check_options(body, vocab_size)
    if problem is not None:
        return problem
    n_prompt = len(body.prompt) // TOKEN_BYTES
    if n_prompt + body.sampling.max_new_tokens > max_context:
        field = "prompt" if n_prompt >= max_context else "sampling.max_new_tokens"
        return bad_request(
            field,
            f"{n_prompt} prompt tokens and max_new_tokens {body.sampling.max_new_tokens} exceed "
            f"the engine's context of {max_context} tokens",
        )
    if body.prefix is None:
        return None
    problem = _check_prefix(body.prefix, body.sampling.max_new_tokens, vocab_size)
    if problem is not None or not truncates(body.sampling, vocab_size):
        return problem
    if len(body.prefix.behaviour_logprobs) != len(body.prefix.tokens):
        why = "missing: those before truncation are none of the policy that sampled"
        return bad_request("prefix.behaviour_logprobs", why)
    return None


def _check_prefix(prefix: Prefix, max_new_tokens: int, vocab_size: int) -> Problem | None:
    problem = check_tokens("prefix.tokens", prefix.tokens, vocab_size)
    if problem is not None:
        return problem
    n_bytes, n_tokens = len(prefix.tokens), len(prefix.tokens) // TOKEN_BYTES
    if n_tokens > max_new_tokens:
        return bad_request(
            "prefix.tokens", f"{n_tokens} tokens; max_new_tokens is {max_new_tokens}"
        )
    if len(prefix.logprobs) != n_bytes:
        return bad_request("prefix.logprobs", f"{len(prefix.logprobs)} bytes for {n_tokens} tokens")
    if prefix.behaviour_logprobs and len(prefix.behaviour_logprobs) != n_bytes:
        size = len(prefix.behaviour_logprobs)
        return bad_request("prefix.behaviour_logprobs", f"{size} bytes for {n_tokens} tokens")
    for version, count in prefix.versions:
        if not 0 <= version <= MAX_VERSION or count < 1:
            return bad_request(
                "prefix.versions", f"({version}, {count}) is no run (version, n_tokens)"
            )
    total = sum(count for _, count in prefix.versions)
    if total != n_tokens:
        return bad_request(
            "prefix.versions", f"runs of {total} tokens in all for {n_tokens} tokens"
        )
    return None


def check_tokens(field: str, raw: bytes, vocab_size: int) -> Problem | None:
    """int32 [n] of token ids that a model of this vocabulary knows; may be empty."""
    if len(raw) > MAX_TOKENS_BYTES:
        return bad_request(field, f"{len(raw)} bytes; at most {MAX_TOKENS_BYTES} are allowed")
    if len(raw) % TOKEN_BYTES:
        return bad_request(
            field, f"{len(raw)} bytes are no int32 array; use a multiple of {TOKEN_BYTES}"
        )
    tokens = np.frombuffer(raw, "<i4")
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if outside.size:
        first = int(outside[0])
        return bad_request(
            field,
            f"token {int(tokens[first])} at index {first} is no token id from 0 to "
            f"{vocab_size - 1}",
        )
    return None


def _bad_sampling(name: str, value: float, limit: str) -> Problem:
    shown = f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return bad_request(f"sampling.{name}", f"{name} is {shown}; it must be {limit}")
