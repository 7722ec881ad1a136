"""The verdict on a run: every outcome judged, everything counted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

from rolloutbus.bus.wire.errors import (
    DeadlineExceeded,
    EngineFailed,
    OutcomeUnknown,
    PeerLost,
    Refused,
    RequestCancelled,
    RequestExpired,
)
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.bus.wire.versions import VersionRule, parse_versions
from rolloutbus.trainer_adapter.client.core.results import FleetResult, Rollout, RolloutCancelled
from tests.drills.simulation.ambush import PHASES
from tests.drills.simulation.detached import judge_detached
from tests.drills.simulation.excuses import excuse, is_impatient
from tests.drills.simulation.leftovers import leftovers
from tests.drills.simulation.oracles import Violation
from tests.drills.simulation.peeks import holds_lease, version_of
from tests.drills.simulation.sim_client import Case, ClientNode
from tests.drills.simulation.sim_router import RouterNode
from tests.drills.simulation.sim_tokens import expected
from tests.drills.simulation.sim_worker import WorkerNode

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

SOMETIMES = (
    "resumed", "several_attempts", "mixed_versions", "cancelled", "expired", "adopted", "lost",
    "fenced", "leases_lost", "leases_expired", "catch_ups", "repairs", "reconnects",
    "stale_endings", "own_pauses", "commands_fenced", "engine_crashes", "resends", "poison_found",
    "isolated", "poisoned", "breaker_opened", "engine_failed", "served_in_haste",
    "publish_version_failed", "publish_version_called_off",
    "sessions_opened", "session_turns", "sessions_moved", "places_moved",
    "detached_collected", "detached_requeued", "takeovers", "routers_stood_down",
    *(f"hit_{phase}" for phase in PHASES),
)  # fmt: skip
"""Events that a large enough set of runs must show, or else it has tested nothing."""
CLIENT_COUNTS = (
    "repairs",
    "reconnects",
    "stale_endings",
    "resends",
    "deferred",
    "sessions_moved",
    "held_back",
)
CONTROL_ERRORS = (
    EngineFailed,
    OutcomeUnknown,
    Refused,
    RequestExpired,
    PeerLost,
    DeadlineExceeded,
)
"""What any other command than `generate` may end with: its caller tries again."""


@dataclass
class Report:
    """What one run showed."""

    seed: int
    trace: str = ""
    violations: list[Violation] = field(default_factory=list[Violation])
    sometimes: Counter[str] = field(default_factory=Counter[str])
    n_requests: int = 0
    n_executions: int = 0


def judge(world: "World") -> Report:
    """The report of a run that is over."""
    broken = world.oracles.broken
    report = Report(world.time.seed, sometimes=world.oracles.seen)
    for client in world.clients.values():
        for rid, case in [*client.given_up, *client.cases.items()]:
            _judge(world, report, rid, case)
    judge_detached(world)
    for text in leftovers(world):
        broken("nothing_left", "", text)
    _judge_peace(world)
    _count(world, report)
    report.n_executions = sum(map(len, world.oracles.runs.values()))
    report.violations = world.oracles.violations
    for event, count in sorted(report.sometimes.items()):
        world.time.record(b"%s %d" % (event.encode(), count))
    report.trace = world.time.trace_hash
    return report


def _judge_peace(world: "World") -> None:
    """Long after the faults everybody serves, with the committed weights."""
    for worker in world.workers.values():
        core, now = worker.core, world.time.now
        if not holds_lease(core.member, now) or core.state != "ready":
            world.oracles.broken("liveness", worker.name, f"is {core.state} at the end")
        elif version_of(core) != world.record.committed.get("default", 0):
            world.oracles.broken("liveness", worker.name, f"is at version {version_of(core)}")
    if world.workload.published_at is None:
        world.oracles.broken("liveness", "", "the weights were never published")


def _judge(world: "World", report: Report, rid: str, case: Case) -> None:
    """One request of a client that lives."""
    broken = world.oracles.broken
    if len(case.outcomes) != 1:
        broken("one_outcome", rid, f"{len(case.outcomes)} outcomes at the end")
        return
    outcome = case.outcomes[0]
    if case.ask.kind != "generate":
        is_whim = isinstance(outcome, RequestCancelled) and case.was_aborted
        if not is_whim and not isinstance(outcome, (msgspec.Struct, FleetResult, *CONTROL_ERRORS)):
            broken("right_outcome", rid, f"{case.ask.kind} ended with {outcome!r}")
        recorded_at = world.fleet_oracles.recorded_at
        is_denied = isinstance(outcome, EngineFailed) and outcome.code == "update_failed"
        if is_denied and recorded_at is not None and recorded_at <= case.ended_at:
            broken("certain_outcome", rid, f"is committed, and its publisher heard {outcome}")
        report.sometimes["publish_version_unknown"] += isinstance(outcome, OutcomeUnknown)
        report.sometimes[f"{case.ask.kind}_failed"] += isinstance(outcome, CONTROL_ERRORS)
        report.sometimes[f"{case.ask.kind}_called_off"] += is_whim
        return
    report.n_requests += 1
    if isinstance(outcome, RolloutCancelled):
        report.sometimes["cancelled"] += 1
        if not case.was_aborted:
            broken("right_outcome", rid, "was cancelled, and nobody asked for that")
        outcome = outcome.partial
    if not isinstance(outcome, Rollout):
        kind = excuse(world, rid, case, outcome)
        if kind:
            report.sometimes[kind] += 1
        else:
            broken("right_outcome", rid, f"ended with {outcome!r}")
        return
    report.sometimes["detached_collected"] += case.is_attached
    report.sometimes["resumed"] += outcome.n_resumed > 0
    report.sometimes["mixed_versions"] += len(outcome.version_runs) > 1
    report.sometimes["several_attempts"] += outcome.n_attempts > 1
    report.sometimes["served_in_haste"] += is_impatient(case)
    text = _wrong(case, outcome)
    if text:
        broken("right_tokens", rid, text)
    text = _stream_wrong(case, outcome)
    if text:
        broken("stream_is_result", rid, text)


def _wrong(case: Case, rollout: Rollout) -> str:
    """What is wrong with a result; empty if nothing is."""
    body = cast("Generate", case.ask.body)
    tokens, logprobs = expected(body.prompt, body.sampling.sampling_seed or 0, rollout.version_runs)
    if rollout.tokens.tobytes() != tokens or rollout.logprobs.tobytes() != logprobs:
        return f"wrong tokens, versions {rollout.version_runs}"
    n_tokens, wanted = len(rollout.tokens), body.sampling.max_new_tokens
    if rollout.finish_reason != "abort" and n_tokens != wanted:
        return f"{n_tokens} tokens instead of {wanted}"
    rule = parse_versions(case.ask.place.versions) if case.ask.place else None
    if isinstance(rule, VersionRule) and rule.kind in {"min", "exact"}:
        bad = [version for version, _ in rollout.version_runs if not rule.accepts(version, version)]
        if bad:
            return f"{rule} was asked for, and {rollout.version_runs} came"
    return ""


def _stream_wrong(case: Case, rollout: Rollout) -> str:
    """How the stream differs from the result; empty if it does not."""
    if not cast("Generate", case.ask.body).stream:
        return "nobody asked for a stream" if case.deltas else ""
    held = b""
    for delta in case.deltas:
        if 4 * delta.start > len(held):
            return f"gap in the stream at token {len(held) // 4}"
        held = held[: 4 * delta.start] + delta.tokens.tobytes()
    tokens = rollout.tokens.tobytes()
    if rollout.finish_reason == "abort":  # either may have been cut off first
        n_bytes = min(len(tokens), len(held))
        tokens, held = tokens[:n_bytes], held[:n_bytes]
    return "the stream differs from the result" if held != tokens else ""


def _count(world: "World", report: Report) -> None:
    seen = report.sometimes
    processes = [*world.routers.all, *world.workers.values(), *world.clients.values(), *world.dead]
    for process in processes:
        if isinstance(process, RouterNode):
            seen.update(process.core.context.counters)
        elif isinstance(process, WorkerNode):
            seen["commands_fenced"] += process.core.member.counters.fenced
            seen["engine_crashes"] += process.n_crashes
        elif isinstance(process, ClientNode):
            for name in CLIENT_COUNTS:
                seen[name] += getattr(process.core.counters, name)
