"""Everything that can be said on the bus: the literal name of each kind and its body type.

A name, once used, keeps its meaning for ever. Spec: docs/protocol.md, "Messages".
"""

import msgspec

from rolloutbus.bus.wire.commands import COMMANDS
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
