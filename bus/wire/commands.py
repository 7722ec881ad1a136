"""Every kind of message by its literal name; commands in one row each: body, sender, target.

A name, once used, keeps its meaning for ever. Spec: docs/protocol.md, "Commands", "Messages".
"""

from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, get_args

import msgspec

from rolloutbus.bus.wire.messages import control, endings, generation, host, membership, weights

Sender = Literal["subscriber", "client", "trainer", "admin", "router"]
"""The first role that may send a command; each role after it may send it, too."""
Target = Literal["router", "worker", "engine", "store"]
"""Who carries a command out: `worker` is a worker's actor, `engine` the engine host below it."""
State = Literal["draining", "torn", "updating", "asleep", "no_weights", "paused"]
"""Of a worker, as in `Heartbeat.state`; `no_weights`: asleep, and its weights are released. A
worker that is `starting` or `broken` refuses every command."""
Trait = Literal["slow", "missed", "versioned", "lasting"]
"""`slow`: it may take minutes, in which the engine makes no steps and its host may be mute.
`missed`: it changes workers, and nobody brings it to those that join later.
`versioned`: it is part of the life of a weight version.
`lasting`: what it did may outlive the engine that did it: in files, or as the fleet's intent."""

COMPUTING: frozenset[State] = frozenset({"draining", "torn", "asleep", "paused"})
"""States that refuse what computes with the model."""


class CommandRow(NamedTuple):
    """Facts of one command, for all its handlers."""

    body: type[msgspec.Struct]
    result: type[msgspec.Struct]
    """Body of its `finished`. Of a command to members: of each member's own `finished`, which are
    inside a `FleetOutcome`."""
    sender: Sender
    target: Target
    refused_in: AbstractSet[State] = frozenset()
    traits: AbstractSet[Trait] = frozenset()


COMMANDS: dict[str, CommandRow] = {
    # generation and reading
    "generate": CommandRow(
        generation.Generate, generation.Generated, "client", "worker", COMPUTING
    ),
    "abort": CommandRow(generation.Abort, generation.Aborted, "client", "worker"),
    "abort_policy": CommandRow(generation.AbortPolicy, generation.Aborted, "trainer", "router"),
    "repair": CommandRow(generation.Repair, generation.Repaired, "subscriber", "worker"),
    "list_detached": CommandRow(
        generation.ListDetached, generation.DetachedList, "client", "router"
    ),
    "attach": CommandRow(generation.Attach, generation.Generated, "client", "router"),
    "score": CommandRow(control.Score, control.Scored, "client", "engine", COMPUTING),
    "embed": CommandRow(control.Embed, control.Embedded, "client", "engine", COMPUTING),
    "rerank": CommandRow(control.Rerank, control.Reranked, "client", "engine", COMPUTING),
    "open_session": CommandRow(
        generation.OpenSession, generation.OpenedSession, "client", "router"
    ),
    "close_session": CommandRow(generation.CloseSession, endings.Done, "client", "router"),
    # the fleet and its engines
    "status": CommandRow(control.Status, control.FleetStatus, "subscriber", "router"),
    "server_info": CommandRow(control.ServerInfo, control.ServerFacts, "client", "worker"),
    "get_load": CommandRow(control.GetLoad, control.Load, "trainer", "engine", {"torn"}),
    "pause": CommandRow(control.Pause, endings.Done, "trainer", "engine", {"torn"}, {"lasting"}),
    "resume": CommandRow(control.Resume, endings.Done, "trainer", "engine", {"torn"}, {"lasting"}),
    "sleep": CommandRow(
        control.Sleep,
        control.Memory,
        "trainer",
        "engine",
        {"draining", "updating"},
        {"slow", "missed"},
    ),
    "wake_up": CommandRow(
        control.WakeUp, control.Memory, "trainer", "engine", traits={"slow", "missed"}
    ),
    "flush_cache": CommandRow(
        control.FlushCache, control.Flushed, "trainer", "engine", {"torn"}, {"missed"}
    ),
    "load_lora": CommandRow(
        control.LoadLora,
        control.Adapters,
        "trainer",
        "engine",
        {"torn", "updating", "asleep"},
        {"slow", "missed"},
    ),
    "unload_lora": CommandRow(
        control.UnloadLora, control.Adapters, "trainer", "engine", {"torn", "asleep"}, {"missed"}
    ),
    "save_weights": CommandRow(
        control.SaveWeights,
        control.Saved,
        "trainer",
        "engine",
        {"torn", "updating", "no_weights"},
        {"slow", "lasting"},
    ),
    "start_profile": CommandRow(
        control.StartProfile,
        endings.Done,
        "trainer",
        "engine",
        {"torn"},
        {"slow", "missed", "lasting"},
    ),
    "stop_profile": CommandRow(
        control.StopProfile,
        control.Profiled,
        "trainer",
        "engine",
        {"torn"},
        {"slow", "missed", "lasting"},
    ),
    "shutdown": CommandRow(
        control.Shutdown, endings.Done, "admin", "worker", traits={"missed", "lasting"}
    ),
    # weights
    "reserve_version": CommandRow(
        weights.ReserveVersion, weights.Reserved, "trainer", "store", traits={"versioned"}
    ),
    "verify_tensors": CommandRow(
        weights.VerifyTensors, endings.Done, "trainer", "store", traits={"versioned"}
    ),
    "seal_version": CommandRow(
        weights.SealVersion, endings.Done, "trainer", "store", traits={"versioned"}
    ),
    "restore_version": CommandRow(
        weights.RestoreVersion, weights.VersionRestored, "trainer", "store", traits={"versioned"}
    ),
    "settle_version": CommandRow(
        weights.SettleVersion, weights.Settled, "trainer", "store", traits={"versioned"}
    ),
    "publish_version": CommandRow(
        weights.PublishVersion, weights.VersionPublished, "trainer", "router", traits={"versioned"}
    ),
    "prepare_update": CommandRow(
        weights.PrepareUpdate,
        weights.Prepared,
        "router",
        "engine",
        {"no_weights"},
        {"slow", "versioned"},
    ),
    "commit_update": CommandRow(
        weights.CommitUpdate,
        weights.Committed,
        "router",
        "engine",
        {"no_weights"},
        {"slow", "versioned"},
    ),
    "abort_update": CommandRow(
        weights.AbortUpdate, endings.Done, "router", "engine", traits={"versioned"}
    ),
    "record_commit": CommandRow(
        weights.RecordCommit, endings.Done, "router", "store", traits={"versioned"}
    ),
    "check_weights": CommandRow(
        weights.CheckWeights, weights.CheckedWeights, "trainer", "engine", {"torn"}
    ),
    "get_weights": CommandRow(
        weights.GetWeights, weights.GotWeights, "trainer", "engine", {"torn"}
    ),
    "list_weights": CommandRow(weights.ListWeights, weights.ListedWeights, "trainer", "engine"),
}
"""Literal name -> row. A name, once used, keeps its meaning for ever."""

RESULTS: dict[str, type[msgspec.Struct]] = {kind: row.result for kind, row in COMMANDS.items()}
COMMAND_OF: dict[type[msgspec.Struct], str] = {row.body: kind for kind, row in COMMANDS.items()}
"""Type of the body -> literal name."""


def sent_by(role: str) -> frozenset[str]:
    """Commands that this role may send; it has all rights of the roles before it."""
    roles = get_args(Sender)
    senders = roles[: roles.index(role) + 1]
    return frozenset(kind for kind, row in COMMANDS.items() if row.sender in senders)


def done_by(*targets: Target) -> frozenset[str]:
    """Commands that these targets carry out."""
    return frozenset(kind for kind, row in COMMANDS.items() if row.target in targets)


def with_trait(trait: Trait) -> frozenset[str]:
    """Commands that have this trait."""
    return frozenset(kind for kind, row in COMMANDS.items() if trait in row.traits)


KINDS: dict[str, type[msgspec.Struct]] = {
    # membership
    "hello": membership.Hello,
    "welcome": membership.Welcome,
    "members": membership.Members,
    "dismissed": membership.Dismissed,
    "beat": membership.Heartbeat,
    "client_beat": membership.ClientHeartbeat,
    "lease": membership.Lease,
    "goodbye": membership.Goodbye,
    "intent": membership.Intent,
    "rejected": membership.Rejected,
    # who may come in
    "allow_list": membership.HandedKeys,
    "enrol": membership.Enrol,
    "enrolled": membership.Enrolled,
    # what engines have cached
    "prefixes": membership.Prefixes,
    # delivery
    "queued": endings.Queued,
    "accepted": endings.Accepted,
    "ack": endings.Ack,
    "lost": endings.Lost,
    "fenced": endings.Fenced,
    # commands
    **{kind: row.body for kind, row in COMMANDS.items()},
    # how far a publication has come
    "update_progress": weights.UpdateProgress,
    # what a trainer stops for all clients
    "policy_aborted": generation.PolicyAborted,
    # sessions that have a place
    "session_moved": generation.SessionMoved,
    # endings; the body of `finished` and `cancelled` depends on the command: see COMMANDS
    "failed": endings.Problem,
    "expired": endings.Problem,
    "refused": endings.Problem,
    # streams
    "deltas": generation.Deltas,
    "idle": generation.Idle,
    # weight store's bulk socket
    "pull_manifest": weights.PullManifest,
    "manifest": weights.Manifest,
    "pull_chunk": weights.PullChunk,
    "chunk": weights.Chunk,
    "pull_delta": weights.PullDelta,
    "delta": weights.WeightDelta,
    "push_chunk": weights.PushChunk,
    # between a worker actor and its engine host
    "engine_starting": host.EngineStarting,
    "engine_ready": host.EngineReady,
    "engine_failed": host.EngineFailure,
    "engine_beat": host.EngineHeartbeat,
    "extras": host.Extras,
}
"""kind -> body type. `finished` and `cancelled` are kinds too; theirs depends on the command."""

ENDINGS = frozenset({"finished", "failed", "cancelled", "expired", "refused"})
