"""From an ending on the wire to what the caller returns or raises."""

from typing import cast

import msgspec
import numpy as np
import xxhash

from rolloutbus.bus.streams.reassembly import Row
from rolloutbus.bus.wire.codec import numpy_of, unpack_as, unpack_fleet, unpack_result
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.errors import (
    BusError,
    EngineFailed,
    OutcomeUnknown,
    PeerLost,
    Refused,
    RemoteProtocolError,
    RequestCancelled,
    RequestError,
    RequestExpired,
    StaleVersion,
)
from rolloutbus.bus.wire.messages.control import WorkerOutcome
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generated
from rolloutbus.trainer_adapter.client.core.effects import Outcome
from rolloutbus.trainer_adapter.client.core.requests import OpenRequest
from rolloutbus.trainer_adapter.client.core.results import (
    FleetResult,
    Float32s,
    Int32s,
    Rollout,
    RolloutCancelled,
)

UPDATE_UNKNOWN = "update_unknown"
VERSION_CODES = frozenset({"stale_version", "version_unavailable"})

CANCELLED = Problem(code="cancelled", message="The request was aborted.", outcome="unknown")

_ERRORS: dict[str, type[RequestError]] = {
    "failed": EngineFailed,
    "expired": RequestExpired,
    "refused": Refused,
    "cancelled": RequestCancelled,
}


def error_of(kind: str, problem: Problem, rid: str) -> RequestError:
    """The exception for an ending `kind` with this problem."""
    if kind == "refused" and problem.code in VERSION_CODES:
        return StaleVersion(problem, rid=rid)
    if problem.code == UPDATE_UNKNOWN:
        return OutcomeUnknown(problem, rid=rid)
    return _ERRORS[kind](problem, rid=rid)


def problem_of(entry: Entry) -> Problem:
    """The body of a `failed`, `expired` or `refused`.

    Raises:
        RemoteProtocolError: it breaks its type.
    """
    return unpack_as(Problem, entry)


def generated_of(entry: Entry) -> Generated | None:
    """The body of a `finished` or `cancelled` generate; None if it brings nothing.

    Raises:
        RemoteProtocolError: it breaks its type, or its columns do not fit together.
    """
    if entry.body == NO_BODY:
        return None
    generated = cast("Generated", unpack_result("generate", entry))
    n_tokens = sum(count for _, count in generated.versions)
    sizes = {len(generated.tokens), len(generated.logprobs)}
    if generated.behaviour_logprobs:
        sizes.add(len(generated.behaviour_logprobs))
    if sizes != {4 * n_tokens}:
        raise RemoteProtocolError(f"{entry.kind}: columns of unequal length")
    for array in generated.arrays.values():
        numpy_of(array)
    return generated


def is_intact(generated: Generated) -> bool:
    """Whether the tokens are those that the worker sent."""
    return xxhash.xxh3_64_intdigest(generated.tokens) == generated.digest


def row_of(generated: Generated) -> Row:
    """All tokens of a result as one row."""
    return Row(
        0,
        generated.tokens,
        generated.logprobs,
        generated.versions,
        generated.behaviour_logprobs,
    )


def ints(tokens: bytes) -> Int32s:
    """int32 [n], read-only."""
    return np.frombuffer(tokens, "<i4")


def floats(logprobs: bytes) -> Float32s:
    """float32 [n], read-only."""
    return np.frombuffer(logprobs, "<f4")


def rollout_of(request: OpenRequest, generated: Generated, worker: str) -> Rollout:
    """The caller's view of a result."""
    logprobs = floats(generated.logprobs)
    truncated = generated.behaviour_logprobs
    return Rollout(
        rid=request.rid,
        tokens=ints(generated.tokens),
        logprobs=logprobs,
        behaviour_logprobs=floats(truncated) if truncated else logprobs,
        version_runs=generated.versions,
        finish_reason=generated.finish_reason,
        worker=worker,
        n_prompt_tokens=generated.n_prompt_tokens,
        n_attempts=request.n_attempts,
        n_resumed=generated.n_resumed,
        queue_ms=generated.queue_ms,
        run_ms=generated.run_ms,
        arrays={name: numpy_of(array) for name, array in generated.arrays.items()},
        lora=generated.lora,
        n_prompt_dropped=request.ask.n_prompt_dropped,
    )


def cancelled(request: OpenRequest, generated: Generated | None) -> RolloutCancelled:
    """The error for an aborted generate, with what the worker (or else the stream) brought."""
    if generated is None:
        held = request.assembly.prefix()
        generated = Generated(
            tokens=held.tokens,
            logprobs=held.logprobs,
            versions=held.versions,
            finish_reason="abort",
            digest=0,
            n_prompt_tokens=request.n_prompt_tokens,
            behaviour_logprobs=held.behaviour_logprobs,
            n_resumed=request.n_prefix,
        )
    return RolloutCancelled(CANCELLED, rollout_of(request, generated, request.worker))


def aborted(request: OpenRequest) -> RequestCancelled:
    """Returns the error for a request that was stopped while only this client held it."""
    if request.is_generate:
        return cancelled(request, None)
    return RequestCancelled(CANCELLED, rid=request.rid)


def result_of(request: OpenRequest, entry: Entry) -> Outcome:
    """The outcome of a control command's ending.

    Raises:
        RemoteProtocolError: the body breaks its type.
    """
    kind = request.ask.kind
    if entry.kind == "cancelled":
        return RequestCancelled(CANCELLED, rid=request.rid)
    if entry.kind != "finished":
        return error_of(entry.kind, problem_of(entry), request.rid)
    if not request.ask.route:
        return unpack_result(kind, entry)
    return fleet_result(kind, entry)


def fleet_result(command: str, entry: Entry) -> FleetResult:
    """One typed result or error per worker.

    Raises:
        RemoteProtocolError: a body breaks its type.
    """
    outcome = unpack_fleet(entry)
    return FleetResult(
        by_worker={
            each.worker: _worker_result(command, each, entry.rid) for each in outcome.results
        },
        silent=outcome.silent,
    )


def _worker_result(command: str, each: WorkerOutcome, rid: str) -> msgspec.Struct | BusError:
    entry = Entry(each.kind, rid=rid, route=each.worker, body=each.body)
    match each.kind:
        case "finished":
            return unpack_result(command, entry)
        case "failed" | "expired" | "refused":
            return error_of(each.kind, problem_of(entry), rid)
        case "cancelled":
            return RequestCancelled(CANCELLED, rid=rid)
        case _:
            return PeerLost(f"{each.worker} answered with {each.kind[:32]!r}")
