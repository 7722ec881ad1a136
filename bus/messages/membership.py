"""Joining the bus and staying on it: hello, welcome, beats, leases, goodbye.

Spec: docs/protocol.md, "Membership".
"""

from typing import Literal

import msgspec

Role = Literal["client", "worker", "store"]


class WorkerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker offers for as long as this lease lasts."""

    policy: str
    """Name of the policy whose weights it serves."""
    stream: str
    """Endpoint of its PUB socket."""
    slots: int
    """Requests that its engine runs side by side."""
    max_context: int
    vocab_size: int
    engine: str
    """`transformers`, `sglang` or `fake`."""
    capabilities: list[str]
    """Command kinds its engine can do."""
    eos_token_ids: list[int] = msgspec.field(default_factory=list[int])
    pid: int = 0


class StoreFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a weight store offers: where its bytes are pulled, what is committed."""

    bulk: str
    """Endpoint that serves manifests and chunks."""
    committed: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Last committed version of each policy, from its durable record."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """First message on a new connection; the name's older connection, if any, is dismissed."""

    role: Role
    name: str
    boot: str
    """Random 128-bit hex name of this process: two processes with one name show."""
    epoch: str = ""
    """A member's new lease, `<boot>.<n>` with n higher than before."""
    router_epoch: int = 0
    """The highest router epoch this peer has obeyed."""
    router_instance: str = ""
    """The router process that epoch belonged to; empty before the first welcome."""
    protocol: tuple[int, int] = (1, 1)
    """Lowest and highest protocol version spoken."""
    worker: WorkerFacts | None = None
    store: StoreFacts | None = None


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker as the router sees it."""

    name: str
    epoch: str
    stream: str
    state: str
    """See the worker life cycle in docs/protocol.md."""
    version: int
    policy: str


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The router's answer to a hello."""

    router_epoch: int
    instance: str
    """Random name of this router process."""
    protocol: int
    """The version both will speak."""
    members: list[Member]
    """To clients: every live worker, so that they can subscribe. Empty to others."""
    bulk: str = ""
    """To clients and workers: where the weight store serves bytes; empty while none is here."""


class Members(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To clients: the whole list again, whenever membership changes."""

    members: list[Member]
    bulk: str = ""


class Dismissed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The router will not serve this connection (again)."""

    code: str
    """`unknown-peer` (say hello again), `replaced`, `protocol`, `bad-hello`, `shutting-down`."""
    message: str


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Every 0.5 s from a worker or store: renews the lease, corrects the router's table."""

    seq: int
    version: int = 0
    """Weights that the engine attests to have active."""
    state: str = "ready"
    """`starting`, `ready`, `paused`, `updating`, `asleep`, `draining` or `broken`."""
    steps: int = 0
    """Engine steps so far: progress."""
    free: int = 0
    """Requests it would start or queue now: credit."""
    running: list[tuple[str, tuple[int, int], str]] = msgspec.field(
        default_factory=list[tuple[str, tuple[int, int], str]]
    )
    """(rid, attempt, client) of everything started and not ended."""
    outbox: list[tuple[str, tuple[int, int], str]] = msgspec.field(
        default_factory=list[tuple[str, tuple[int, int], str]]
    )
    """(rid, attempt, client) of endings not yet acknowledged by their client."""
    n_tokens: int = 0
    """Tokens sampled since the process started."""
    stalled_ms: float = 0.0
    """Generation stall of the last weight update."""


class ClientBeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every 0.5 s from a client: keeps its requests alive."""

    seq: int


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to a beat: the sender's lease runs on from the moment it SENT beat `seq`."""

    router_epoch: int
    instance: str
    seq: int


class Goodbye(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender leaves in good order; its lease ends now."""

    reason: str = ""
