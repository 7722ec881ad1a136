"""Control of engines and of the fleet: pause, memory, cache, status, life cycle.

Spec: docs/protocol.md, "Control".
"""

from typing import Annotated, Literal

import msgspec

from rolloutbus.bus.wire.limits import (
    MAX_KINDS,
    MAX_MEMBERS,
    Counters,
    KindNames,
    Labels,
    Names,
    Natural,
    Reasons,
    Sentence,
    SessionsByWorker,
    Short,
    Troubles,
    VersionsByPolicy,
)
from rolloutbus.bus.wire.messages.weights import UpdateStatus

PauseMode = Literal["abort", "in_place", "retract", "drain"]
Paused = Literal["", "abort", "in_place", "retract", "drain"]
"""A pause mode; empty: not paused."""
PausesByWorker = Annotated[dict[Short, Paused], msgspec.Meta(max_length=MAX_MEMBERS)]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
CacheTier = Literal["device", "host", "storage"]
DEVICE: CacheTier = "device"


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stop sampling between two engine steps; no new request is dispatched to the worker."""

    mode: PauseMode = "in_place"


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Go on after a pause."""


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Release memory by tag; the worker must be idle or paused with `abort`."""

    tags: Annotated[list[MemoryTag], msgspec.Meta(max_length=MAX_KINDS)]


class WakeUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take released memory back by tag."""

    tags: Annotated[list[MemoryTag], msgspec.Meta(max_length=MAX_KINDS)]


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `sleep` and `wake_up`."""

    size_bytes: Counters
    """Per tag, released or taken back."""
    asleep: KindNames
    """Tags released now."""


class FlushCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget cached prefixes that no request uses."""

    tiers: Annotated[list[CacheTier], msgspec.Meta(max_length=MAX_KINDS)] = msgspec.field(
        default_factory=lambda: [DEVICE]
    )


class Flushed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `flush_cache`."""

    n_tokens: Natural


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Finish what runs (`drain`) or end it, then leave."""

    drain: bool = True


class ServerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask a worker for its engine's facts and counters."""


class ServerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `server_info`."""

    engine: Short
    version: Natural
    state: Short
    steps: Natural
    n_running: Natural
    n_waiting: Natural
    n_kv_tokens: Natural
    vocab_size: Natural
    max_context: Natural
    slots: Natural
    parallel: Counters = msgspec.field(default_factory=dict[str, int])
    """`tp`, `pp`, `dp`, `ep`: over how many ranks the model is split."""
    software: Labels = msgspec.field(default_factory=dict[str, str])
    """Name -> version of what the engine is made of."""
    features: KindNames = msgspec.field(default_factory=list[str])
    """What a `generate` may ask for; see "Generation"."""
    adapters: Counters = msgspec.field(default_factory=dict[str, int])
    """Loaded adapters and their versions."""
    asleep: KindNames = msgspec.field(default_factory=list[str])
    """Memory tags released now."""


class WorkerOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's ending of a fleet command."""

    worker: Short
    kind: Short
    """`finished`, `failed`, `cancelled`, `expired` or `refused`."""
    body: msgspec.Raw


class FleetOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `finished` for a command sent to workers: one ending each, and who is missing."""

    results: Annotated[list[WorkerOutcome], msgspec.Meta(max_length=MAX_MEMBERS)]
    silent: Names
    """Workers that had not answered at the deadline, were lost while it ran, or were not there and
    do not catch up with it when they join."""


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask the router for its table."""


class WorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the router's table."""

    name: Short
    epoch: Short
    state: Short
    policy: Short
    version: Natural
    engine: Short
    slots: Natural
    n_running: Natural
    n_tokens: Natural
    beat_age_ms: int
    stalled_ms: float
    pid: Natural
    problem: Sentence = ""
    """Why it missed the last update: it gets no requests until it has caught up."""
    n_marks: Natural = 0
    """Beginnings of prompts that it has cached, as far as it has told the router."""
    blocked_by: Reasons = msgspec.field(default_factory=dict[str, str])
    """Why it gets no requests: a word for each reason, and a sentence. Empty: it gets them."""


class FleetStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `status`."""

    router_epoch: Natural
    instance: Short
    recovering: bool
    workers: Annotated[list[WorkerStatus], msgspec.Meta(max_length=MAX_MEMBERS)]
    committed: VersionsByPolicy
    """Last committed version per policy."""
    n_queued: Natural
    n_running: Natural
    n_clients: Natural
    counters: Counters
    sessions: SessionsByWorker = msgspec.field(default_factory=dict[str, int])
    """Open sessions per worker that has any."""
    troubled: Troubles = msgspec.field(default_factory=dict[str, str])
    """Workers that fail too much to be given work, gone ones too -> what failed last."""
    updates: Annotated[list[UpdateStatus], msgspec.Meta(max_length=MAX_MEMBERS)] = []
    """Weight updates under way."""
    fleet: Short = ""
    """Random identity of the fleet."""
    pause: Paused = ""
    """Mode in which the fleet is to be paused, whoever joins; empty: it is not."""
    paused: PausesByWorker = msgspec.field(default_factory=dict[str, Paused])
    """The same for single workers; empty: it goes on although the fleet is paused."""
