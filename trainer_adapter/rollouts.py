"""What a generation request is made of, and how the samples of a batch are grouped."""

import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np

from bus.entry import Placement
from bus.errors import Refused
from bus.messages.endings import Problem
from bus.messages.generation import (
    NOTHING_MORE,
    Generate,
    Grammar,
    Media,
    Processor,
    Sampling,
    Want,
)
from bus.messages.limits import MAX_TOKENS_BYTES
from bus.outgoing import sealed, seconds_of
from bus.validation import check_placement
from trainer_adapter.logit_processors import action_mask, disallowed_tokens
from trainer_adapter.requests import Ask
from trainer_adapter.rollout import Int32s, OnLoss

Prompt = Sequence[int] | np.ndarray[tuple[Any, ...], np.dtype[Any]]
"""Token ids, at least one; an int32 array is sent without conversion."""

DEFAULT_DEADLINE_S = 600.0


class GenerateOptions(TypedDict, total=False):
    """Everything about a generation besides prompt and sampling; all optional."""

    deadline_s: float
    """Seconds from now for the whole request, queueing included; 600 if absent."""
    session: str
    """Requests of one session stay on one worker."""
    group: str
    """Requests of one group share a worker's prefix cache."""
    versions: str
    """`any`, `latest`, `min:V`, `exact:V` or `max-staleness:K`; `any` if absent."""
    policy: str
    """Name of the policy whose weights are asked for; `default` if absent."""
    priority: int
    """Higher goes first; -100..100, 0 if absent."""
    on_loss: OnLoss
    """When the worker is lost: `resume` (if absent), `retry` or `fail`."""
    detached: bool
    """It goes on when this process ends, and is not stopped when its caller stops waiting; see
    `RolloutClient.reattach`. Its `group` tells it apart then."""
    lora: str
    """Adapter, `NAME` or `NAME@VERSION`; none if absent. See `RolloutClient.load_lora`."""
    want: Want
    """What to tell besides tokens and logprobs: it comes in `Rollout.arrays`."""
    grammar: Grammar
    """The output must match it."""
    processors: Sequence[Processor]
    """Change logits before sampling, in this order; see `trainer_adapter.logit_processors`."""
    action_mask: Sequence[int]
    """Token ids: nothing else is sampled. Short for the processor of this name, put first."""
    disallowed_tokens: Sequence[int]
    """Token ids that are not sampled. Short for the processor of this name, put first."""
    media: Sequence[Media]
    """What the placeholder tokens in the prompt stand for, in their order."""


def ask_of(
    prompt: Prompt, sampling: Sampling, options: GenerateOptions, *, stream: bool = False
) -> Ask:
    """The request for one continuation.

    Raises:
        Refused: the prompt or an option is no valid value; `.field` names it.
    """
    deadline_s = seconds_of(options.get("deadline_s", DEFAULT_DEADLINE_S))
    sampling, _ = sealed(sampling, Sampling, field="sampling")
    if not 0 < deadline_s < math.inf:
        message = f"a deadline is a number of seconds above 0, not {deadline_s}"
        raise Refused(_bad("deadline_s", message))
    tokens = tokens_of(prompt)
    place = Placement(
        policy=options.get("policy", "default"),
        versions=options.get("versions", "any"),
        session=options.get("session", ""),
        group=options.get("group", ""),
        cost=len(tokens) + sampling.max_new_tokens,
        priority=options.get("priority", 0),
        outlives_client=options.get("detached", False),
    )
    place, _ = sealed(place, Placement, field="place")
    problem = check_placement(place)
    if problem is not None:
        raise Refused(problem)
    body = Generate(
        prompt=tokens.tobytes(),
        sampling=sampling,
        stream=stream,
        lora=options.get("lora", ""),
        want=options.get("want", NOTHING_MORE),
        grammar=options.get("grammar"),
        processors=_processors_of(options),
        media=list(options.get("media", ())),
    )
    return Ask("generate", body, place=place, on_loss=options.get("on_loss", "resume"))


def _processors_of(options: GenerateOptions) -> list[Processor]:
    short: list[Processor] = []
    if "action_mask" in options:
        short.append(action_mask(options["action_mask"]))
    if "disallowed_tokens" in options:
        short.append(disallowed_tokens(options["disallowed_tokens"]))
    return [*short, *options.get("processors", ())]


def group_asks(
    prompts: Sequence[Prompt], sampling: Sampling, n: int, options: GenerateOptions
) -> Iterator[Ask]:
    """The n samples of each prompt: a group of its own, and seeds `seed + i` if one is given.

    Raises:
        Refused: as `ask_of`; `n` below 1.
    """
    if n < 1:
        raise Refused(_bad("n", f"{n} samples were asked for; ask for at least one"))
    for prompt in prompts:
        group = options.get("group") or f"g-{secrets.token_hex(8)}"
        first = ask_of(prompt, sampling, {**options, "group": group})
        for index in range(n):
            yield sample_of(first, sampling, index)


def sample_of(first: Ask, sampling: Sampling, index: int) -> Ask:
    """Sample number `index` of the same prompt."""
    body = first.body
    if sampling.seed is not None and isinstance(body, Generate):
        own = msgspec.structs.replace(sampling, seed=sampling.seed + index)
        body = msgspec.structs.replace(body, sampling=own)
    return Ask(first.kind, body, place=first.place, on_loss=first.on_loss, retries_busy=True)


def tokens_of(prompt: Prompt) -> Int32s:
    """int32 [n_prompt_tokens], little endian, contiguous.

    Raises:
        Refused: empty, not one-dimensional, or not integers that fit int32.
    """
    try:
        array = np.asarray(prompt)
    except (ValueError, TypeError) as error:
        raise Refused(_bad("prompt", f"a prompt is a list of token ids: {error}")) from error
    if array.ndim != 1 or array.size == 0:
        raise Refused(_bad("prompt", f"a prompt has one dimension and a token: {array.shape}"))
    if not np.issubdtype(array.dtype, np.integer):
        raise Refused(_bad("prompt", f"token ids are integers, not {array.dtype}"))
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise Refused(_bad("prompt", "a token id is negative or does not fit int32"))
    tokens = np.ascontiguousarray(array, "<i4")
    if tokens.nbytes > MAX_TOKENS_BYTES:
        raise Refused(_bad("prompt", f"a prompt has at most {MAX_TOKENS_BYTES // 4} tokens"))
    return tokens


def _bad(field: str, message: str) -> Problem:
    return Problem("bad_request", message, "not_started", field=field)
