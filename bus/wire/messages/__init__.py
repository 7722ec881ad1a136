"""Everything that can be said on the bus: the literal name of each kind and its body type.

A name, once used, keeps its meaning for ever. Spec: docs/protocol.md, "Messages".
"""

import msgspec

from rolloutbus.bus.wire.messages import (
    control,
    delivery,
    endings,
    engine,
    generation,
    host,
    membership,
    prefixes,
    session,
    stream,
    weights,
)

KINDS: dict[str, type[msgspec.Struct]] = {
    # membership
    "hello": membership.Hello,
    "welcome": membership.Welcome,
    "members": membership.Members,
    "dismissed": membership.Dismissed,
    "beat": membership.Beat,
    "client_beat": membership.ClientBeat,
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
    "generate": generation.Generate,
    "abort": generation.Abort,
    "repair": generation.Repair,
    "list_detached": generation.ListDetached,
    "attach": generation.Attach,
    "pause": control.Pause,
    "resume": control.Resume,
    "sleep": control.Sleep,
    "wake_up": control.WakeUp,
    "flush_cache": control.FlushCache,
    "server_info": control.ServerInfo,
    "shutdown": control.Shutdown,
    "score": engine.Score,
    "embed": engine.Embed,
    "rerank": engine.Rerank,
    "load_lora": engine.LoadLora,
    "unload_lora": engine.UnloadLora,
    "save_weights": engine.SaveWeights,
    "start_profile": engine.StartProfile,
    "stop_profile": engine.StopProfile,
    "get_load": engine.GetLoad,
    "open_session": session.OpenSession,
    "close_session": session.CloseSession,
    "status": control.Status,
    "reserve_version": weights.ReserveVersion,
    "seal_version": weights.SealVersion,
    "restore_version": weights.RestoreVersion,
    "settle_version": weights.SettleVersion,
    "publish_version": weights.PublishVersion,
    "prepare_update": weights.PrepareUpdate,
    "commit_update": weights.CommitUpdate,
    "abort_update": weights.AbortUpdate,
    "record_commit": weights.RecordCommit,
    "check_weights": weights.CheckWeights,
    "get_weights": weights.GetWeights,
    # how far a publication has come
    "update_progress": weights.UpdateProgress,
    # sessions that have a place
    "session_moved": session.SessionMoved,
    # endings; the body of `finished` and `cancelled` depends on the command: see RESULTS
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
    "delta": weights.Delta,
    "push_chunk": weights.PushChunk,
    # between a worker actor and its engine host
    "engine_ready": host.EngineReady,
    "engine_failed": host.EngineFailed,
    "engine_beat": host.EngineBeat,
    "extras": host.Extras,
}
"""kind -> body type. `finished` and `cancelled` are kinds too; their body is in RESULTS."""

RESULTS: dict[str, type[msgspec.Struct]] = {
    "generate": generation.Generated,
    "abort": generation.Aborted,
    "repair": generation.Repaired,
    "list_detached": generation.DetachedList,
    "attach": generation.Generated,
    "pause": endings.Done,
    "resume": endings.Done,
    "sleep": control.Memory,
    "wake_up": control.Memory,
    "flush_cache": control.Flushed,
    "server_info": control.ServerFacts,
    "shutdown": endings.Done,
    "score": engine.Scored,
    "embed": engine.Embedded,
    "rerank": engine.Reranked,
    "load_lora": engine.Adapters,
    "unload_lora": engine.Adapters,
    "save_weights": engine.Saved,
    "start_profile": endings.Done,
    "stop_profile": engine.Profiled,
    "get_load": engine.Load,
    "open_session": session.OpenedSession,
    "close_session": endings.Done,
    "status": control.FleetStatus,
    "reserve_version": weights.Reserved,
    "seal_version": endings.Done,
    "restore_version": weights.Restored,
    "settle_version": weights.Settled,
    "publish_version": weights.Published,
    "prepare_update": weights.Prepared,
    "commit_update": weights.Committed,
    "abort_update": endings.Done,
    "record_commit": endings.Done,
    "check_weights": weights.CheckedWeights,
    "get_weights": weights.GotWeights,
}
"""command kind -> body of its `finished` (for a command sent to workers through the router:
of each worker's own `finished`, inside a `FleetOutcome`)."""

ENDINGS = frozenset({"finished", "failed", "cancelled", "expired", "refused"})
COMMANDS = frozenset(RESULTS)

COMMAND_OF: dict[type[msgspec.Struct], str] = {KINDS[kind]: kind for kind in COMMANDS}
"""body type of a command -> its kind."""
