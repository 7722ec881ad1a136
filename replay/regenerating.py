"""Recorded requests asked again of a live fleet: what to ask, and what differs.

Pure; arrays are numpy's. Spec: docs/journal.md.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Generate,
    SamplingParams,
    VersionRuns,
    Want,
)
from rolloutbus.replay.trajectories import Answered, Floats, Ints, floats, ints

_PLAIN = SamplingParams()
_OF_LOGITS = (
    "temperature",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_new_tokens",
)


def to_sample(recorded: Answered) -> Generate:
    """The same request: its sampling, seed and all other rules."""
    return msgspec.structs.replace(recorded.generate, stream=False, prefix=None, want=NOTHING_MORE)


def to_score(recorded: Answered) -> Generate | str:
    """Request to score the recorded tokens as `prompt_logprobs`, or why there is none."""
    changes = changes_of_logits(recorded.generate)
    if changes:
        return f"its logprobs are not the model's own: {', '.join(changes)}"
    if not recorded.result.tokens:
        return "it has no tokens"
    start = len(recorded.generate.prompt) // TOKEN_BYTES
    return msgspec.structs.replace(
        recorded.generate,
        prompt=recorded.generate.prompt + recorded.result.tokens,
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        stream=False,
        prefix=None,
        want=Want(prompt_logprobs=True, prompt_logprobs_start=start),
    )


def changes_of_logits(generate: Generate) -> list[str]:
    """Options of a request that make its logprobs differ from the model's own."""
    plain, asked = (msgspec.structs.asdict(each) for each in (_PLAIN, generate.sampling))
    changes = [name for name in _OF_LOGITS if asked[name] != plain[name]]
    changes += ["grammar"] if generate.grammar is not None else []
    return changes + [processor.name for processor in generate.processors]


LOGPROB_TOLERANCE = 1e-3
"""Engines batch differently each time, and sums of floats depend on their order."""


class Again(msgspec.Struct, frozen=True):
    """What was sampled again."""

    tokens: Ints
    """int32 [n]."""
    logprobs: Floats
    """float32 [n]."""
    version_runs: VersionRuns
    finish_reason: str


class Difference(msgspec.Struct, frozen=True):
    """Of one request."""

    rid: str
    is_equal: bool
    """All tokens and the reason why it ended, and logprobs as far as is tolerated."""
    n_recorded: int
    """Tokens."""
    n_again: int
    first: int | None
    """Index of the first token that is another one, or is not there; None: there is none."""
    max_logprob_delta: float
    """Of the tokens before that."""
    versions_recorded: VersionRuns
    versions_again: VersionRuns
    finish_recorded: str
    finish_again: str
    is_reproducible: bool
    """It was seeded, or greedy; any other draws other tokens each time."""
    problem: str = ""
    """Why it was not sampled again; empty if it was."""


def is_repeatable(recorded: Answered) -> bool:
    """Whether the same weights draw the same tokens again: it was seeded, or greedy."""
    sampling = recorded.generate.sampling
    return sampling.sampling_seed is not None or sampling.temperature == 0


def difference(
    recorded: Answered, again: Again | str, tolerance: float = LOGPROB_TOLERANCE
) -> Difference:
    """Compare; `again` may be the reason why there is nothing to compare with."""
    problem = again if isinstance(again, str) else ""
    if isinstance(again, str):
        again = Again(np.empty(0, "<i4"), np.empty(0, "<f4"), [], "")
    before = recorded.result
    tokens = ints(before.tokens)
    first = 0 if problem else first_difference(tokens, again.tokens)
    n_same = len(tokens) if first is None else first
    delta = max_delta(floats(before.logprobs)[:n_same], again.logprobs[:n_same])
    is_equal = first is None and delta <= tolerance and before.finish_reason == again.finish_reason
    return Difference(
        rid=recorded.rid,
        is_equal=is_equal,
        n_recorded=len(tokens),
        n_again=len(again.tokens),
        first=first,
        max_logprob_delta=delta,
        versions_recorded=before.versions,
        versions_again=list(again.version_runs),
        finish_recorded=before.finish_reason,
        finish_again=again.finish_reason,
        is_reproducible=is_repeatable(recorded),
        problem=problem,
    )


def first_difference(some: Ints, others: Ints) -> int | None:
    """Index of the first place where they differ, or where one of them ends; None: they do not."""
    n_both = min(len(some), len(others))
    (places,) = np.nonzero(some[:n_both] != others[:n_both])
    if len(places):
        return int(places[0])
    return n_both if len(some) != len(others) else None


def max_delta(some: Floats, others: Floats) -> float:
    """Largest absolute difference; equal infinities differ by nothing."""
    if not len(some):
        return 0.0
    with np.errstate(invalid="ignore"):
        deltas = np.where(some == others, 0.0, np.abs(some - others))
    return float(np.nan_to_num(deltas, nan=np.inf, posinf=np.inf).max())


def summary(found: Sequence[Difference]) -> dict[str, int | float]:
    """Counts over all requests, and the largest difference of a logprob."""
    return {
        "requests": len(found),
        "equal": sum(each.is_equal for each in found),
        "different": sum(not each.is_equal and not each.problem for each in found),
        "failed": sum(bool(each.problem) for each in found),
        "not_reproducible": sum(not each.is_reproducible for each in found),
        "max_logprob_delta": max((each.max_logprob_delta for each in found), default=0.0),
    }
