"""Checks of values that types cannot express: what callers and peers may ask for.

Each check returns the first `Problem` it finds (`bad_request`, not started, with the field and
the limit), or None. Types and unknown fields are the codec's business.
Spec: docs/protocol.md, "Limits".
"""

import math
import re
from collections.abc import Iterator

import numpy as np

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.limits import MAX_SHORT_CHARS, MAX_STOP_TOKEN_IDS, MAX_TOKENS_BYTES
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Generate, Prefix, SamplingParams
from rolloutbus.bus.wire.option_checks import check_options, list_problems, truncates
from rolloutbus.bus.wire.versions import MAX_VERSION, parse_versions

MAX_NAME_BYTES = MAX_SHORT_CHARS
"""Names of actors, policies, sessions and groups."""
MAX_RID_BYTES = MAX_NAME_BYTES + 59
"""A client's name, a slash, and a number below 2**192 in decimal: a counter and 128 random bits."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
"""Below it, and not 0, logits divided by it would overflow."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
MAX_ADDITIVE_PENALTY = 2.0
"""Frequency and presence penalties lie in [-2, 2]."""
MAX_PRIORITY = 100
"""Priorities lie in [-100, 100]."""
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
    """What a client asks the router for beside a `generate`."""
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
    return problem


def cost_of(body: Generate) -> int:
    """Tokens that a request can take: its prompt, and all that it may sample."""
    return len(body.prompt) // TOKEN_BYTES + max(0, min(body.sampling.max_new_tokens, MAX_COST))


def check_cost(place: Placement, body: Generate, *, max_context: int) -> Problem | None:
    """What a header says about its body: routers reckon with it and do not look."""
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
