"""Messages by which actors join the bus and stay on it, and what workers report of their caches.

Spec: docs/protocol.md, "Membership", "Prefix affinity".
"""

from typing import Annotated, Literal

import msgspec

from rolloutbus.bus.wire.durations import Durations, DurationsByName
from rolloutbus.bus.wire.limits import (
    MAX_MEMBERS,
    MAX_PRINCIPALS,
    AttemptList,
    BacklogRows,
    Claims,
    Count,
    Counters,
    DetachedRids,
    EosTokenIds,
    Gauges,
    HeaderText,
    KindNames,
    MarkNews,
    Natural,
    Patterns,
    Priority,
    Rids,
    RouterEpoch,
    Sentence,
    Short,
    Suspects,
    TagsByPolicy,
    VersionsByPolicy,
    WavesByPolicy,
)
from rolloutbus.bus.wire.messages.control import Paused, PausesByWorker


class Prefixes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Changes of a worker's prefix cache since the message before."""

    seq: Natural
    """Grows by one; at 0 the receiver forgets what was said before."""
    added: MarkNews = b""
    """Marks, uint64 [k] little endian: beginnings of prompts that are cached now."""
    removed: MarkNews = b""
    """Of those that are not any more."""


Role = Literal["client", "worker", "store", "router"]


class WorkerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker's offer for as long as this lease lasts."""

    policy: Short
    """Name of the policy whose weights it serves."""
    stream: HeaderText
    """Endpoint of its PUB socket."""
    slots: Count
    """Requests that its engine runs side by side."""
    max_context: Natural
    vocab_size: Natural
    engine: Short
    """`transformers`, `sglang` or `fake`."""
    capabilities: KindNames
    """Command kinds its engine can do."""
    eos_token_ids: EosTokenIds = msgspec.field(default_factory=list[int])
    pid: Natural = 0
    host: HeaderText = ""
    """Identity of its host: whoever has the same one can share memory with it."""
    gpus: KindNames = msgspec.field(default_factory=list[str])
    """UUIDs of the GPUs that hold its weights."""
    bulk: HeaderText = ""
    """Endpoint that serves weight versions it has verified; empty: it serves none."""
    transports: KindNames = msgspec.field(default_factory=list[str])
    """Ways by which it can take weights."""
    adapters: Counters = msgspec.field(default_factory=dict[str, int])
    """Name -> version of those that it has when it says this."""


class StoreFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A weight store's offer: where its bytes are pulled, and what is committed."""

    bulk: HeaderText
    """Endpoint that serves manifests and chunks."""
    committed: VersionsByPolicy = msgspec.field(default_factory=dict[str, int])
    """Last committed version of each policy, from its durable record."""
    host: HeaderText = ""
    """Identity of its host."""
    has_files: bool = False
    """It writes versions to files as well, for workers that see the same disk."""
    waves: WavesByPolicy = msgspec.field(default_factory=dict[str, tuple[int, int]])
    """Policies whose last commit is not at all workers yet -> (version committed before it, workers
    that have to serve meanwhile)."""
    adapters: VersionsByPolicy = msgspec.field(default_factory=dict[str, int])
    """`<policy>.<adapter>` -> version that all workers of the policy are to have."""
    tags: TagsByPolicy = msgspec.field(default_factory=dict[str, list[tuple[int, int]]])
    """(version, label) of the latest committed versions of each policy that bear one."""


class Intent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The wanted state of the fleet; members keep a copy for the next router."""

    stamp: tuple[RouterEpoch, Natural] = (0, 0)
    """(router epoch, n) of the last change; later intents compare greater."""
    fleet: Short = ""
    """Random identity of the fleet; empty: nobody has named it yet."""
    pause: Paused = ""
    """Mode in which every worker is paused; empty: none is."""
    workers: PausesByWorker = msgspec.field(default_factory=dict[str, Paused])
    """Name -> the same for single workers, before `pause`; empty: it goes on all the same."""

    def pause_of(self, worker: str) -> Paused:
        """Mode in which this worker is to be paused; empty if it is not."""
        return self.workers.get(worker, self.pause)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """First message on a new connection; the name's older connection, if any, is dismissed."""

    role: Role
    name: Short
    boot: Short
    """Random 128-bit hex name of this process: two processes with one name show."""
    epoch: Short = ""
    """A member's new lease, `<boot>.<n>` with n higher than before."""
    router_epoch: RouterEpoch = 0
    """The highest router epoch this peer has obeyed."""
    router_instance: Short = ""
    """The router process that epoch belonged to; empty before the first welcome."""
    protocol: tuple[int, int] = (1, 1)
    """Lowest and highest protocol version spoken."""
    worker: WorkerFacts | None = None
    store: StoreFacts | None = None
    intent: Intent | None = None
    """Of a member: what a router told it last, or what its record says."""


def served_by(hello: Hello) -> list[str]:
    """Endpoints that a member listens on for others."""
    served: list[str] = []
    if hello.worker is not None:
        served += [hello.worker.stream, hello.worker.bulk]
    if hello.store is not None:
        served.append(hello.store.bulk)
    return [endpoint for endpoint in served if endpoint]


class AllowedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key of the allow-list, and its rights; see `bus.security.principals.Principal`."""

    key: Short
    name: Short
    role: Short
    actors: Patterns = msgspec.field(default_factory=list[str])
    sessions: Patterns = msgspec.field(default_factory=list[str])
    priorities: tuple[Priority, Priority] = (0, 0)


AllowedKeys = Annotated[list[AllowedKey], msgspec.Meta(max_length=MAX_PRINCIPALS)]


class HandedKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to member: the allow-list, the whole of it, after the welcome and at each change."""

    stamp: Short
    """Digest of the list; members repeat it in their heartbeats."""
    keys: AllowedKeys


class Enrol(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who holds an invitation asks the router to let a key of theirs in."""

    key: Short
    """Public key, 64 hexadecimal digits."""


class Enrolled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key stands in the allow-list."""

    name: Short
    role: Short


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker as the router sees it."""

    name: Short
    epoch: Short
    stream: HeaderText
    state: Short
    """See the worker life cycle in docs/protocol.md."""
    version: Natural
    policy: Short
    gpus: KindNames = msgspec.field(default_factory=list[str])
    """UUIDs of the GPUs that hold its weights."""


MemberList = Annotated[list[Member], msgspec.Meta(max_length=MAX_MEMBERS)]


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The router's answer to a hello."""

    router_epoch: Natural
    instance: Short
    """Random name of this router process."""
    protocol: int
    """The version both will speak."""
    members: MemberList
    """To clients: every live worker, so that they can subscribe. Empty to others."""
    bulk: HeaderText = ""
    """To clients and workers: where the weight store serves bytes; empty while none is here."""
    up_ms: Natural = 0
    """How long this router has been running: whoever was answered by another one since knows
    that there are two."""
    tap: HeaderText = ""
    """To clients: where the router publishes what it routes; empty: nowhere."""
    marks: bool = False
    """To clients: put marks into the placements; workers tell what they have cached."""
    fleet: Short = ""
    """Identity of the fleet; empty while a restarted router waits for who knows it."""


class Members(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To clients: the whole list again, whenever membership changes."""

    members: MemberList
    bulk: HeaderText = ""
    marks: bool = False
    fleet: Short = ""


EXPLAINED = frozenset({"bad-hello", "protocol", "unreachable"})
"""Codes of a dismissal of which the operator of the one dismissed must read the message."""


class Dismissed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The router will not serve this connection (again)."""

    code: Short
    """`unknown-peer` (say hello again), `replaced`, `protocol`, `bad-hello`, `forbidden`,
    `other-fleet`, `unreachable`, `shutting-down`, `standby`."""
    message: Sentence

    @property
    def is_final(self) -> bool:
        """Whether the peer is to stay away; otherwise it greets, or connects, again."""
        return self.code not in ("unknown-peer", "shutting-down", "standby")


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Every 0.5 s from a worker or store: renews the lease, corrects the router's table."""

    seq: Natural
    version: Natural = 0
    """Weights that the engine attests to have active."""
    state: Short = "ready"
    """`starting`, `ready`, `paused`, `updating`, `torn`, `asleep`, `draining`, `frozen` or
    `broken`."""
    steps: Natural = 0
    """Engine steps so far: progress."""
    free: Natural = 0
    """Requests it would start or queue now: credit."""
    running: Claims = msgspec.field(default_factory=list[tuple[str, tuple[int, int], str]])
    """(rid, attempt, client) of everything started and not ended."""
    outbox: Claims = msgspec.field(default_factory=list[tuple[str, tuple[int, int], str]])
    """(rid, attempt, client) of endings not yet acknowledged by their client: those that came
    since the heartbeat `follows`; all of them if that is 0."""
    n_tokens: Natural = 0
    """Tokens sampled since the process started."""
    stalled_ms: float = 0.0
    """Generation stall of the last weight update."""
    detached: DetachedRids = msgspec.field(default_factory=list[tuple[str, str]])
    """(rid, group) of those in `running` and `outbox` that go on without their client."""
    over: Rids = msgspec.field(default_factory=list[str])
    """After a hello only: detached requests that have ended for their caller, as clients said."""
    suspects: Suspects = msgspec.field(default_factory=list[tuple[str, int, int]])
    """After a hello only: (rid, n, k) of requests under which this worker's engine died n times,
    k of them while nothing else ran."""
    intent: tuple[RouterEpoch, Natural] = (0, 0)
    """Stamp of the intent that it knows."""
    follows: Natural = 0
    """Number of the heartbeat whose news `outbox` and `acked` continue; 0: what was told before is
    void."""
    acked: AttemptList = msgspec.field(default_factory=list[tuple[str, tuple[int, int]]])
    """Endings that were told of and wait no more."""
    n_outbox: Natural | None = None
    """Endings that wait in all; more than was told of if there are too many for one heartbeat.
    None: `outbox` has them all."""
    backlog: BacklogRows = msgspec.field(default_factory=list[tuple[str, int, int]])
    """(client, endings, bytes) of clients that have not acknowledged much."""
    counters: Counters = msgspec.field(default_factory=dict[str, int])
    """What the process has counted since it started; see `bus.wire.counters`."""
    durations: DurationsByName = msgspec.field(default_factory=dict[str, Durations])
    """What it has measured since then; absent: nothing of this name."""
    gauges: Gauges = msgspec.field(default_factory=dict[str, float])
    """Figures of the moment, of a store."""
    keys: Short = ""
    """Stamp of the allow-list that the router handed over this connection; empty: none yet."""


class ClientHeartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every 0.5 s from a client: keeps its requests alive."""

    seq: Natural


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Answer to a heartbeat: the sender's lease runs on from the moment it SENT heartbeat `seq`."""

    router_epoch: Natural
    instance: Short
    seq: Natural
    is_behind: bool = False
    """To a member: heartbeats were missed; tell of all endings again."""


class Goodbye(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender leaves in good order; its lease ends now."""

    reason: Sentence = ""


class Rejected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peer to a second router: the sender obeys another one, which lives. The receiver exits."""

    router_epoch: RouterEpoch
    instance: Short
    """Of the router obeyed."""
