"""What a caller gets back: rollouts, deltas, and one result per worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, cast

import msgspec
import numpy as np

from rolloutbus.bus.wire.codec import AnyArray, numpy_of
from rolloutbus.bus.wire.errors import (
    BusError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    RequestCancelled,
)
from rolloutbus.bus.wire.messages.endings import Outcome, Problem
from rolloutbus.bus.wire.messages.generation import Array, FinishReason, VersionRuns
from rolloutbus.bus.wire.near_names import no_attribute

ResultT = TypeVar("ResultT", bound=msgspec.Struct)

Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]
Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]
Float32s = np.ndarray[tuple[int], np.dtype[np.float32]]
Float32Table = np.ndarray[tuple[int, int], np.dtype[np.float32]]

OnLoss = Literal["resume", "retry", "fail"]
"""What becomes of a request whose worker was lost: go on after the tokens held, start again, or
raise PeerLost."""

MAX_NAMED = 8
"""Workers that an error names; `.result` has all."""

NO_TOKENS: Int32s = np.zeros(0, np.int32)
NO_LOGPROBS: Float32s = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Rollout:
    """One finished continuation. Arrays are read-only."""

    rid: str
    tokens: Int32s
    """int32 [n]: generated tokens only, a stop token included."""
    logprobs: Float32s
    """float32 [n]: natural log, after temperature and penalties, before truncation."""
    behaviour_logprobs: Float32s
    """float32 [n]: renormalised over the support that was sampled from; equal to `logprobs`
    where nothing truncates."""
    version_runs: VersionRuns
    """[(version, n_tokens)]: which weights computed the logits of which tokens."""
    finish_reason: FinishReason
    worker: str
    """Name of the worker that finished it."""
    n_prompt_tokens: int
    n_attempts: int
    """Executions begun for it, as far as this client saw."""
    n_resumed: int
    """Tokens kept from earlier attempts whose worker was lost or whose engine stopped them."""
    queue_ms: float
    """From arrival at the worker to the first engine step, in the last attempt."""
    run_ms: float
    """Time in the engine, in the last attempt."""
    arrays: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray])
    """What `want` asked for, by name; docs/protocol.md, "Arrays", has dtypes and shapes. A row per
    token begins at token `n_resumed`. bfloat16 comes as float32. Empty if it was aborted."""
    lora: str = ""
    """`NAME@VERSION` of the adapter that sampled all tokens, as the engine had it loaded, also if
    the request named no version. Empty: no adapter, or a partial that no worker has vouched for."""
    n_prompt_dropped: int = 0
    """Tokens of the caller's prompt that `truncate` left out; `n_prompt_tokens` counts the rest."""

    if not TYPE_CHECKING:  # a type checker knows without it that there is none

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(self, name, {"versions": "version_runs"})

    @cached_property
    def token_versions(self) -> Int64s:
        """int64 [n]: the version of each token."""
        versions = np.array([version for version, _ in self.version_runs], np.int64)
        return np.repeat(versions, [n_tokens for _, n_tokens in self.version_runs])


class RolloutCancelled(RequestCancelled):
    """The request was aborted; `.partial` holds what had been sampled."""

    def __init__(self, problem: Problem, partial: Rollout) -> None:
        super().__init__(problem, rid=partial.rid)
        self.partial = partial


@dataclass(frozen=True, slots=True)
class Delta:
    """The next tokens of a stream, all of one weight version."""

    rid: str
    start: int
    """Index of the first token in the rollout. Always where the last delta ended, except after
    lost work had to be sampled anew from an earlier point: what was held from `start` on is then
    void."""
    tokens: Int32s
    """int32 [k]; k may be 0 only in the last delta."""
    logprobs: Float32s
    """float32 [k]."""
    version: int
    finish_reason: FinishReason | None = None
    """Set in the last delta, and only there."""
    worker: str = ""
    """Name of the worker that sampled the tokens."""
    rollout: Rollout | None = None
    """The whole of it, in the last delta, and only there."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Result of scoring."""

    scores: Float32Table
    """float32 [items, labels]: probabilities, logprobs, or logits of classes."""
    n_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Result of embedding."""

    rows: Float32Table
    """float32 [inputs, d]."""
    n_prompt_tokens: int


class FleetCommandFailed(BusError):
    """A command to workers that failed on some of them; `.result` has each worker's answer.

    `.outcome` is `not_started` if nobody did anything, `failed` if each that did not do it said so,
    and `unknown` if one gave no answer.
    """

    def __init__(self, result: "FleetResult") -> None:
        """`result`: of the command, with an error or a silent worker in it."""
        super().__init__(_what_failed(result), outcome=_outcome_of(result))
        self.result = result


@dataclass(frozen=True, slots=True)
class FleetResult:
    """How a command ended on each worker it was sent to."""

    by_worker: Mapping[str, msgspec.Struct | BusError]
    """Worker -> its typed result, or the error that it answered."""
    silent: list[str] = field(default_factory=list[str])
    """Workers that had not answered at the deadline, were lost while the command ran, or were away
    and do not catch up with it when they join."""

    @property
    def errors(self) -> dict[str, BusError]:
        """Workers that answered with an error -> the error."""
        return {
            name: result for name, result in self.by_worker.items() if isinstance(result, BusError)
        }

    def check(self) -> None:
        """Raises unless every worker did it; the client's own commands call this themselves.

        Raises:
            FleetCommandFailed: it says who did not do it, and why.
        """
        if self.silent or self.errors:
            raise FleetCommandFailed(self) from next(iter(self.errors.values()), None)

    def only(self, kind: type[ResultT]) -> ResultT:
        """The one result of a command with one target.

        Raises:
            BusError: the target's error.
            PeerLost: the target did not answer.
        """
        for error in self.errors.values():
            raise error
        if self.silent:
            raise PeerLost(f"no answer from {', '.join(self.silent)}")
        for result in self.by_worker.values():
            if isinstance(result, kind):
                return result
        raise LocalProtocolError(f"no {kind.__name__} among the results")


def _what_failed(result: FleetResult) -> str:
    """Returns one sentence: how many workers failed, which ones, and why."""
    errors = result.errors
    lines = [f"{name}: {type(each).__name__}: {each}" for name, each in sorted(errors.items())]
    lines += [f"{name}: no answer (late, lost or not there)" for name in sorted(result.silent)]
    more = [f"and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    n_targets = len(result.by_worker) + len(result.silent)
    done = sorted(result.by_worker.keys() - errors.keys())
    others = f"; done by {', '.join(done[:MAX_NAMED])}" if done else ""
    reasons = "; ".join([*lines[:MAX_NAMED], *more])
    return f"{len(lines)} of {n_targets} targets did not do it: {reasons}{others}"


def _outcome_of(result: FleetResult) -> Outcome:
    errors = result.errors
    if result.silent or any(each.outcome == "unknown" for each in errors.values()):
        return "unknown"
    is_nothing_done = len(errors) == len(result.by_worker)
    if is_nothing_done and all(each.outcome == "not_started" for each in errors.values()):
        return "not_started"
    return "failed"


def rollout_in(result: object) -> Rollout:
    """The rollout that ended a generate.

    Raises:
        RemoteProtocolError: it is something else.
    """
    if not isinstance(result, Rollout):
        raise RemoteProtocolError(f"generate ended with a {type(result).__name__}")
    return result


def vector_of(array: Array) -> Float32s:
    """float32 [n]; raises as `table_of`."""
    return cast("Float32s", _floats(array, 1))


def table_of(array: Array) -> Float32Table:
    """float32 [n, m].

    Raises:
        RemoteProtocolError: it is something else.
    """
    return cast("Float32Table", _floats(array, 2))


def _floats(array: Array, n_dimensions: int) -> AnyArray:
    values = numpy_of(array)
    if values.dtype != np.float32 or values.ndim != n_dimensions:
        raise RemoteProtocolError(f"an array {array.dtype} {array.shape} where scores belong")
    return values
