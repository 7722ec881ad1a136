"""Checks of what a `generate` may ask for besides its tokens: lists, wishes, grammar, media.

Spec: docs/protocol.md, "Limits".
"""

import re
from collections.abc import Iterator, Sequence

from rolloutbus.bus.wire.limits import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS_OF,
    MAX_MEDIA,
    MAX_PARAM_ITEMS,
    MAX_PARAMS,
    MAX_PIECE_BYTES,
    MAX_PROCESSORS,
    MAX_SHORT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEXT_CHARS,
)
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Generate,
    Grammar,
    Media,
    Processor,
    SamplingParams,
    Want,
)

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
