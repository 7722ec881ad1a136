"""What a generation request is made of, and how the samples of a batch are grouped."""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, Unpack, cast

import msgspec
import numpy as np

from rolloutbus.bus.strict_calls import Described, Spelled
from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.limits import MAX_TOKENS_BYTES
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Generate,
    Grammar,
    Media,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.bus.wire.outgoing import sealed, seconds_of
from rolloutbus.bus.wire.validation import MAX_COST, MAX_SEED, MIN_SEED, check_placement
from rolloutbus.bus.wire.versions import VERSIONS_TEXT, VERSIONS_WANTED
from rolloutbus.trainer_adapter.client import logit_processors
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import Int32s, OnLoss

Prompt = Sequence[int] | np.ndarray[tuple[Any, ...], np.dtype[Any]]
"""Token ids, at least one; an int32 array is sent without conversion."""

DEFAULT_DEADLINE_S = 600.0
MAX_TOKEN_ID = 2**31 - 1
OFF_ELSEWHERE = -1
"""The value of `top_k` that means "off" in other libraries."""


SamplingLike = SamplingParams | Mapping[str, Any]
"""How tokens are drawn; a dict has the fields of `SamplingParams`."""
SessionName = Annotated[
    str, Described("the name of one session; `generate_batch` takes one for each prompt")
]
Truncate = Literal["refuse", "left", "right"]
"""What becomes of a prompt that is too long: it is refused, or loses its first or last tokens."""
VersionsRule = Annotated[str, Spelled(VERSIONS_TEXT, VERSIONS_WANTED)]


class SharedOptions(TypedDict, total=False):
    """The keyword parameters that a turn of a session and a batch have in common.

    What they mean and their defaults: `ask_of`.
    """

    deadline_s: float
    group: str
    versions: VersionsRule
    priority: int
    on_loss: OnLoss
    detached: bool
    lora: str
    want: Want
    grammar: Grammar | None
    processors: Sequence[Processor]
    action_mask: Sequence[int] | None
    disallowed_tokens: Sequence[int] | None


class TurnOptions(SharedOptions, total=False):
    """The keyword parameters of `RolloutClient.generate`, without those that a session sets."""

    media: Sequence[Media]


class GenerateOptions(TurnOptions, total=False):
    """All keyword parameters of `RolloutClient.generate`, to hand them on as one."""

    session: SessionName
    policy: str
    worker: str
    max_prompt_tokens: int
    truncate: Truncate


class BatchOptions(SharedOptions, total=False):
    """All keyword parameters of `RolloutClient.generate_batch` that one request has, too."""

    media: Sequence[Media] | Sequence[Sequence[Media]]

    session: SessionName | Sequence[str]
    policy: str
    worker: str
    max_prompt_tokens: int
    truncate: Truncate


def ask_of(
    prompt: Prompt,
    sampling: SamplingLike,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    session: SessionName = "",
    group: str = "",
    versions: VersionsRule = "any",
    policy: str = "default",
    worker: str = "",
    max_prompt_tokens: int = 0,
    truncate: Truncate = "refuse",
    priority: int = 0,
    on_loss: OnLoss = "resume",
    detached: bool = False,
    lora: str = "",
    want: Want = NOTHING_MORE,
    grammar: Grammar | None = None,
    processors: Sequence[Processor] = (),
    action_mask: Sequence[int] | None = None,
    disallowed_tokens: Sequence[int] | None = None,
    media: Sequence[Media] = (),
    stream: bool = False,
) -> Ask:
    """The request for one continuation; see `RolloutClient.generate`.

    A `top_k` of -1 is off, too. With `stream` deltas come with every engine step.

    Raises:
        Refused: the prompt or an option is no valid value; `.field` names it.
    """
    deadline_s = seconds_of(deadline_s)
    sampling = _sound(sampling)
    if not 0 < deadline_s < math.inf:
        message = f"a deadline is a number of seconds above 0, not {deadline_s}"
        raise Refused(bad_request("deadline_s", message))
    given = tokens_of(prompt)
    tokens = _truncated(given, max_prompt_tokens, truncate)
    if truncate != "refuse" and (session or detached or media):
        raise Refused(bad_request("truncate", _why_whole(session, media)))
    place = Placement(
        policy=policy,
        versions=versions,
        session=session,
        group=group,
        cost=min(len(tokens) + sampling.max_new_tokens, MAX_COST),
        priority=priority,
        outlives_client=detached,
        worker=worker,
    )
    place, _ = sealed(place, Placement, field="place")
    problem = check_placement(place)
    if problem is not None:
        raise Refused(problem)
    body = Generate(
        prompt=tokens.tobytes(),
        sampling=sampling,
        stream=stream,
        lora=lora,
        want=want,
        grammar=grammar,
        processors=[*_short(action_mask, disallowed_tokens), *processors],
        media=list(media),
    )
    n_dropped = len(given) - len(tokens)
    return Ask("generate", body, place=place, on_loss=on_loss, n_prompt_dropped=n_dropped)


def _sound(given: SamplingLike) -> SamplingParams:
    """The sampling of a request, with `top_k` as the bus spells it.

    Raises:
        Refused: a value is none; `.field` names it.
    """
    sampling, _ = sealed(sampling_of(given), SamplingParams, field="sampling")
    if sampling.max_new_tokens < 1:  # else the cost that is made of it would be blamed
        message = f"{sampling.max_new_tokens} is not at least 1"
        raise Refused(bad_request("sampling.max_new_tokens", message))
    if sampling.top_k == OFF_ELSEWHERE:
        return msgspec.structs.replace(sampling, top_k=0)
    return sampling


def _short(
    action_mask: Sequence[int] | None, disallowed_tokens: Sequence[int] | None
) -> Iterator[Processor]:
    """The processors that the two short options stand for."""
    if action_mask is not None:
        yield logit_processors.action_mask(action_mask)
    if disallowed_tokens is not None:
        yield logit_processors.disallowed_tokens(disallowed_tokens)


def _truncated(tokens: Int32s, n_most: int, truncate: Truncate) -> Int32s:
    """The prompt, cut where it is too long; 0: it may have any length.

    Raises:
        Refused: it is too long, and is not to be cut; or the two options do not fit together.
    """
    if n_most < 0 or (truncate != "refuse" and not n_most):
        message = f"{n_most}: say how many tokens a prompt may have, at least 1"
        raise Refused(bad_request("max_prompt_tokens", message))
    if not n_most or len(tokens) <= n_most:
        return tokens
    if truncate == "refuse":
        message = (
            f"{len(tokens)} tokens are more than max_prompt_tokens={n_most}; "
            "truncate='left' drops the first ones, 'right' the last"
        )
        raise Refused(bad_request("prompt", message))
    return tokens[-n_most:] if truncate == "left" else tokens[:n_most]


def _why_whole(session: str, media: Sequence[Media]) -> str:
    """Why a prompt may not be cut."""
    if session:
        return "a turn goes on after the turns before it: begin another session with fewer tokens"
    if media:
        return "the places of its media might be cut off: shorten it where it is made"
    return "who collects a detached request could not be told of it: shorten it where it is made"


def deadline_of(options: SharedOptions) -> float:
    """Seconds from now, as `ask_of` understands the options."""
    return options.get("deadline_s", DEFAULT_DEADLINE_S)


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """One prompt of a batch, with what was said for it: its samples are rows of the batch."""

    prompt: Prompt
    sampling: SamplingParams
    seed: int | None
    """Of its first sample; None: as `sampling` says."""
    options: GenerateOptions

    def asks(self, n: int) -> list[Ask]:
        """Its n samples; with a seed, each is drawn with one more than the sample before.

        Raises:
            Refused: as `ask_of`.
        """
        first = ask_of(self.prompt, self.sampling, **self.options)
        return [_row_of(first, self.seed, index) for index in range(n)]


def batch_prompts(
    prompts: Sequence[Prompt],
    sampling: SamplingLike | Sequence[SamplingLike],
    n: int,
    seed: int | Sequence[int] | None = None,
    **options: Unpack[BatchOptions],
) -> Iterator[BatchPrompt]:
    """Each prompt with its sampling, seed, session and media, and a group if none is named.

    Raises:
        Refused: `n` is below 1, or a list has not one value for each prompt; `.field` names it.
    """
    if n < 1:
        raise Refused(bad_request("n", f"{n} samples were asked for; ask for at least one"))
    n_prompts = len(prompts)
    samplings = [sampling_of(each) for each in _for_each(n_prompts, "sampling", sampling)]
    sessions = _for_each(n_prompts, "session", options.get("session", ""))
    media = _media_of_each(n_prompts, options.get("media", ()))
    if seed is None and samplings and isinstance(sampling, SamplingParams | Mapping):
        seeds = _counted(samplings[0].sampling_seed, n_prompts, n)
    else:
        seeds = _own_seeds(samplings, seed, n)
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, int | np.integer):
            message = (
                "prompts is a list of prompts, each a list of token ids, such as [[1, 2], [3]]"
            )
            raise Refused(bad_request("prompts", f"{message}; this is a list of token ids"))
        group = options.get("group") or f"g-{secrets.token_hex(8)}"
        own: GenerateOptions = {
            **options,
            "group": group,
            "session": sessions[number],
            "media": media[number],
        }
        yield BatchPrompt(prompt, samplings[number], seeds[number], own)


def _for_each(n_prompts: int, field: str, given: Any) -> Sequence[Any]:  # noqa: ANN401 - any option
    """One value for each prompt: those of a list, or the same value for all."""
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
        return [given] * n_prompts
    each = cast("Sequence[Any]", given)
    if len(each) != n_prompts:
        message = f"{len(each)} values for {n_prompts} prompts: give one for all, or one for each"
        raise Refused(bad_request(field, message))
    return each


def _media_of_each(
    n_prompts: int, given: Sequence[Media] | Sequence[Sequence[Media]]
) -> Sequence[Sequence[Media]]:
    """The media of each prompt: a list of lists has one for each, a list of media is for all."""
    if given and all(isinstance(each, list | tuple) for each in given):
        return _for_each(n_prompts, "media", given)
    return [cast("Sequence[Media]", given)] * n_prompts


def _own_seeds(
    samplings: Sequence[SamplingParams], seed: int | Sequence[int] | None, n: int
) -> Sequence[int | None]:
    """The seed of each prompt's first sample as `seed` has it; None: as its sampling says."""
    if seed is None:
        return [None] * len(samplings)
    if any(each.sampling_seed is not None for each in samplings):
        message = "a sampling has a sampling_seed, too: say it in one of the two"
        raise Refused(bad_request("seed", message))
    for each in cast("Sequence[object]", given := _for_each(len(samplings), "seed", seed)):
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise Refused(bad_request("seed", f"a seed is an integer, not {each!r:.40}"))
        if not MIN_SEED <= each <= MAX_SEED:
            raise Refused(bad_request("seed", f"{each} does not fit int64"))
    if isinstance(seed, int | np.integer):
        return _counted(int(seed), len(samplings), n)
    return [int(each) for each in given]


def _counted(seed: int | None, n_prompts: int, n: int) -> Sequence[int | None]:
    """The seed of each prompt's first sample, by its row; see `row_seed`."""
    if seed is None or not MIN_SEED <= seed <= MAX_SEED:  # another one is refused by its name
        return [None] * n_prompts
    return [row_seed(seed, number * n) for number in range(n_prompts)]


def row_seed(seed: int, row: int) -> int:
    """Seed of row `row` of a batch: `seed + row`, within int64 (after 2**63 - 1 comes -2**63).

    Rows are counted over the whole batch, so that a prompt that stands in it twice is sampled
    differently; row 0 is sampled as one request with this seed would be.
    """
    return (seed + row - MIN_SEED) % (MAX_SEED - MIN_SEED + 1) + MIN_SEED


def _row_of(first: Ask, seed: int | None, index: int) -> Ask:
    """The same prompt as a row of a batch."""
    body = first.body
    assert isinstance(body, Generate)
    seed = body.sampling.sampling_seed if seed is None else seed
    if seed is not None and MIN_SEED <= seed <= MAX_SEED:  # another one is refused by its name
        own = msgspec.structs.replace(body.sampling, sampling_seed=row_seed(seed, index))
        body = msgspec.structs.replace(body, sampling=own)
    return msgspec.structs.replace(first, body=body, retries_busy=True)


def sampling_of(given: SamplingLike) -> SamplingParams:
    """Returns the SamplingParams that the caller gave, as a struct or as a dict.

    Raises:
        Refused: it is neither, or has a field that does not exist.
    """
    if isinstance(given, Mapping):
        try:
            given = SamplingParams(**given)
        except TypeError as error:
            raise Refused(bad_request("sampling", str(error))) from error
    if not isinstance(given, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance] - callers
        message = (
            f"SamplingParams or a dict of its fields, not a value of type {type(given).__name__}"
        )
        raise Refused(bad_request("sampling", message))
    return given


def tokens_of(prompt: Prompt) -> Int32s:
    """int32 [n_prompt_tokens], little endian, contiguous.

    Raises:
        Refused: empty, not one-dimensional, or not integers that fit int32.
    """
    if isinstance(prompt, str | bytes):
        message = "token ids, not text: TextClient(client, tokenizer) takes text"
        raise Refused(bad_request("prompt", f"a prompt is a list of {message}"))
    if isinstance(prompt, Mapping):
        message = "not what a tokenizer returns: give its ['input_ids']"
        raise Refused(bad_request("prompt", f"a prompt is a list of token ids, {message}"))
    try:
        array = np.asarray(prompt)
    except (ValueError, TypeError) as error:
        raise Refused(bad_request("prompt", f"a prompt is a list of token ids: {error}")) from error
    if array.ndim == 1 and array.size == 0:
        raise Refused(bad_request("prompt", "a prompt has at least a token; this one is empty"))
    if array.ndim != 1:
        shape = f"not an array of shape {array.shape}"
        raise Refused(bad_request("prompt", f"a prompt is one list of token ids, {shape}"))
    if array.dtype.kind not in "iu":
        raise Refused(bad_request("prompt", f"token ids are integers, not {array.dtype}"))
    # Without its sign a negative number is larger than all that fit: so one look is enough.
    if np.maximum.reduce(array.astype(np.uint64)) > MAX_TOKEN_ID:
        raise Refused(bad_request("prompt", "a token id is negative or does not fit int32"))
    tokens = np.ascontiguousarray(array, "<i4")
    if tokens.nbytes > MAX_TOKENS_BYTES:
        raise Refused(bad_request("prompt", f"a prompt has at most {MAX_TOKENS_BYTES // 4} tokens"))
    return tokens
