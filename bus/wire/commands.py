"""Everything that can be said on the bus: the literal name of each kind and its body type.

A name, once used, keeps its meaning for ever. Spec: docs/protocol.md, "Messages".
"""

from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, get_args

import msgspec

from rolloutbus.bus.wire.messages import (
    delivery,
    endings,
    host,
    membership,
    prefixes,
    session,
    stream,
    weights,
)
from rolloutbus.bus.wire.messages.control import (
    FleetStatus,
    FlushCache,
    Flushed,
    Memory,
    Pause,
    Resume,
    ServerFacts,
    ServerInfo,
    Shutdown,
    Sleep,
    Status,
    WakeUp,
)
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.engine import (
    Adapters,
    Embed,
    Embedded,
    GetLoad,
    Load,
    LoadLora,
    Profiled,
    Rerank,
    Reranked,
    Saved,
    SaveWeights,
    Score,
    Scored,
    StartProfile,
    StopProfile,
    UnloadLora,
)
from rolloutbus.bus.wire.messages.generation import (
    Abort,
    Aborted,
    Attach,
    DetachedList,
    Generate,
    Generated,
    ListDetached,
    Repair,
    Repaired,
)
from rolloutbus.bus.wire.messages.session import CloseSession, OpenedSession, OpenSession
from rolloutbus.bus.wire.messages.weights import (
    AbortUpdate,
    CheckedWeights,
    CheckWeights,
    Committed,
    CommitUpdate,
    GetWeights,
    GotWeights,
    Prepared,
    PrepareUpdate,
    PublishVersion,
    RecordCommit,
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SealVersion,
    Settled,
    SettleVersion,
    VersionPublished,
    VersionRestored,
)

Sender = Literal["subscriber", "client", "trainer", "admin", "router"]
"""The first role that may send a command; each role after it may send it, too."""
Target = Literal["router", "worker", "engine", "store"]
"""Who carries a command out: `worker` is a worker's actor, `engine` the engine host below it."""
State = Literal["draining", "torn", "updating", "asleep", "no_weights", "paused"]
"""Of a worker, as in `Heartbeat.state`; `no_weights`: asleep, and its weights are released. A
worker that is `starting` or `broken` refuses every command."""
Trait = Literal["slow", "missed", "versioned"]
"""`slow`: it may take minutes, in which the engine makes no steps and its host may be mute.
`missed`: it changes workers, and nobody brings it to those that join later.
`versioned`: it is part of the life of a weight version."""

COMPUTING: frozenset[State] = frozenset({"draining", "torn", "asleep", "paused"})
"""States that refuse what computes with the model."""


class CommandRow(NamedTuple):
    """What holds for one command, whoever handles it."""

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
    "generate": CommandRow(Generate, Generated, "client", "worker", COMPUTING),
    "abort": CommandRow(Abort, Aborted, "client", "worker"),
    "repair": CommandRow(Repair, Repaired, "subscriber", "worker"),
    "list_detached": CommandRow(ListDetached, DetachedList, "client", "router"),
    "attach": CommandRow(Attach, Generated, "client", "router"),
    "score": CommandRow(Score, Scored, "client", "engine", COMPUTING),
    "embed": CommandRow(Embed, Embedded, "client", "engine", COMPUTING),
    "rerank": CommandRow(Rerank, Reranked, "client", "engine", COMPUTING),
    "open_session": CommandRow(OpenSession, OpenedSession, "client", "router"),
    "close_session": CommandRow(CloseSession, Done, "client", "router"),
    # the fleet and its engines
    "status": CommandRow(Status, FleetStatus, "subscriber", "router"),
    "server_info": CommandRow(ServerInfo, ServerFacts, "trainer", "worker"),
    "get_load": CommandRow(GetLoad, Load, "trainer", "engine", {"torn"}),
    "pause": CommandRow(Pause, Done, "trainer", "engine", {"torn"}),
    "resume": CommandRow(Resume, Done, "trainer", "engine", {"torn"}),
    "sleep": CommandRow(
        Sleep, Memory, "trainer", "engine", {"draining", "updating"}, {"slow", "missed"}
    ),
    "wake_up": CommandRow(WakeUp, Memory, "trainer", "engine", traits={"slow", "missed"}),
    "flush_cache": CommandRow(FlushCache, Flushed, "trainer", "engine", {"torn"}, {"missed"}),
    "load_lora": CommandRow(
        LoadLora, Adapters, "trainer", "engine", {"torn", "updating", "asleep"}, {"slow", "missed"}
    ),
    "unload_lora": CommandRow(
        UnloadLora, Adapters, "trainer", "engine", {"torn", "asleep"}, {"missed"}
    ),
    "save_weights": CommandRow(
        SaveWeights, Saved, "trainer", "engine", {"torn", "updating", "no_weights"}, {"slow"}
    ),
    "start_profile": CommandRow(
        StartProfile, Done, "trainer", "engine", {"torn"}, {"slow", "missed"}
    ),
    "stop_profile": CommandRow(
        StopProfile, Profiled, "trainer", "engine", {"torn"}, {"slow", "missed"}
    ),
    "shutdown": CommandRow(Shutdown, Done, "admin", "worker", traits={"missed"}),
    # weights
    "reserve_version": CommandRow(
        ReserveVersion, Reserved, "trainer", "store", traits={"versioned"}
    ),
    "seal_version": CommandRow(SealVersion, Done, "trainer", "store", traits={"versioned"}),
    "restore_version": CommandRow(
        RestoreVersion, VersionRestored, "trainer", "store", traits={"versioned"}
    ),
    "settle_version": CommandRow(SettleVersion, Settled, "trainer", "store", traits={"versioned"}),
    "publish_version": CommandRow(
        PublishVersion, VersionPublished, "trainer", "router", traits={"versioned"}
    ),
    "prepare_update": CommandRow(
        PrepareUpdate, Prepared, "router", "engine", {"no_weights"}, {"slow", "versioned"}
    ),
    "commit_update": CommandRow(
        CommitUpdate, Committed, "router", "engine", {"no_weights"}, {"slow", "versioned"}
    ),
    "abort_update": CommandRow(AbortUpdate, Done, "router", "engine", traits={"versioned"}),
    "record_commit": CommandRow(RecordCommit, Done, "router", "store", traits={"versioned"}),
    "check_weights": CommandRow(CheckWeights, CheckedWeights, "trainer", "engine", {"torn"}),
    "get_weights": CommandRow(GetWeights, GotWeights, "trainer", "engine", {"torn"}),
}
"""Literal name -> row. A name, once used, keeps its meaning for ever."""

RESULTS: dict[str, type[msgspec.Struct]] = {kind: row.result for kind, row in COMMANDS.items()}
COMMAND_OF: dict[type[msgspec.Struct], str] = {row.body: kind for kind, row in COMMANDS.items()}
"""Type of the body -> literal name."""


def sent_by(role: str) -> frozenset[str]:
    """Commands that this role may send: those of the roles before it, too."""
    roles = get_args(Sender)
    senders = roles[: roles.index(role) + 1]
    return frozenset(kind for kind, row in COMMANDS.items() if row.sender in senders)


def done_by(*targets: Target) -> frozenset[str]:
    """Commands that one of these carries out."""
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
    # what engines have cached
    "prefixes": prefixes.Prefixes,
    # delivery
    "queued": delivery.Queued,
    "accepted": delivery.Accepted,
    "ack": delivery.Ack,
    "lost": delivery.Lost,
    "fenced": delivery.Fenced,
    # commands
    **{kind: row.body for kind, row in COMMANDS.items()},
    # how far a publication has come
    "update_progress": weights.UpdateProgress,
    # sessions that have a place
    "session_moved": session.SessionMoved,
    # endings; the body of `finished` and `cancelled` depends on the command: see COMMANDS
    "failed": endings.Problem,
    "expired": endings.Problem,
    "refused": endings.Problem,
    # streams
    "deltas": stream.Deltas,
    "idle": stream.Idle,
    # weight store's bulk socket
    "pull_manifest": weights.PullManifest,
    "manifest": weights.Manifest,
    "pull_chunk": weights.PullChunk,
    "chunk": weights.Chunk,
    "pull_delta": weights.PullDelta,
    "delta": weights.WeightDelta,
    "push_chunk": weights.PushChunk,
    # between a worker actor and its engine host
    "engine_ready": host.EngineReady,
    "engine_failed": host.EngineFailure,
    "engine_beat": host.EngineHeartbeat,
    "extras": host.Extras,
}
"""kind -> body type. `finished` and `cancelled` are kinds too; theirs depends on the command."""

ENDINGS = frozenset({"finished", "failed", "cancelled", "expired", "refused"})
