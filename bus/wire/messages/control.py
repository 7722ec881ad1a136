"""Messages that control engines and the fleet, and what else an engine can be asked.

Spec: docs/protocol.md, "Control", "More of an engine".
"""

from typing import Annotated, Literal

import msgspec

from rolloutbus.bus.wire.durations import Durations, DurationsByName
from rolloutbus.bus.wire.limits import (
    MAX_KINDS,
    MAX_LABELS,
    MAX_MEMBERS,
    MAX_SCORED,
    Column,
    Columns,
    Counters,
    Gauges,
    HeaderText,
    KindNames,
    Labels,
    Names,
    Natural,
    Paths,
    PathText,
    Reasons,
    Sentence,
    SessionsByWorker,
    Short,
    Text,
    Troubles,
    VersionsByPolicy,
)
from rolloutbus.bus.wire.messages.generation import Array
from rolloutbus.bus.wire.messages.weights import UpdateStatus

SaveKind = Literal["safetensors", "sharded", "remote"]


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask how likely each label token follows a query and an item. Ends with `Scored`."""

    query: Column
    """int32 [q], may be empty."""
    items: Columns
    """int32 [m] each."""
    label_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_LABELS)]
    """Ignored by models that classify."""
    apply_softmax: bool = True
    """Shares of the labels alone; otherwise logprobs, or logits of classes."""
    item_first: bool = False
    """The item stands before the query."""


class Scored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `score`."""

    scores: Array
    """float32 [items, labels]."""
    n_prompt_tokens: Natural


class Embed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vector for each input. Ends with `Embedded`."""

    inputs: Columns
    """int32 [m] each."""
    dimensions: Natural = 0
    """Cut vectors to so many, for models made for it; 0: all."""


class Embedded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `embed`."""

    embeddings: Array
    """float32 [inputs, d]."""
    n_prompt_tokens: Natural


class Rerank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask how well each text fits its query. Ends with `Reranked`."""

    pairs: Annotated[list[tuple[Text, Text]], msgspec.Meta(max_length=MAX_SCORED)]
    """(query, text)."""


class Reranked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `rerank`."""

    scores: Array
    """float32 [pairs], higher fits better."""


class LoadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load an adapter, from files or from the weight store. Ends with `Adapters`."""

    name: Short
    version: Natural = 0
    path: PathText = ""
    """Directory of a PEFT adapter below the worker's `weights_root`; empty: from the store."""
    bulk: HeaderText = ""
    """Where the store serves bytes; needed without a path."""


class UnloadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget an adapter. Ends with `Adapters`."""

    name: Short


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `load_lora` and `unload_lora`: all that are loaded now."""

    adapters: Counters
    """Name -> version."""


class SaveWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write the active weights to a place that the operator has named. Ends with `Saved`."""

    target: Short
    """One of the worker's `save_targets`."""
    name: Short
    """Directory in it."""
    kind: SaveKind


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `save_weights`."""

    path: PathText
    files: Paths
    """Relative to `path`; empty when the engine does not tell."""
    size_bytes: Natural


class StartProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record what the engine does. Ends with `Done`."""

    n_steps: Natural = 0
    """Stop by itself after so many; 0: at `stop_profile`."""
    activities: Annotated[list[Short], msgspec.Meta(max_length=MAX_KINDS)] = msgspec.field(
        default_factory=lambda: ["CPU", "GPU"]
    )
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write the record. Ends with `Profiled`."""


class Profiled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `stop_profile`."""

    files: Paths
    """Relative to the worker's `profile_dir`."""


class GetLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Read the engine's gauges. Ends with `Load`."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `get_load`; the names are the engine's own."""

    gauges: Gauges


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


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Finish what runs (`drain`) or end it, then leave."""

    drain: bool = True
    comes_back: bool = False
    """Whoever says so starts the worker again: the router expects it. It is not told to workers."""


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
    clock_ms: Natural = 0
    """Milliseconds since 1970 by the clock of the worker's host when it answered; 0: not told."""


class WorkerOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's ending of a fleet command."""

    worker: Short
    kind: Short
    """`finished`, `failed`, `cancelled`, `expired` or `refused`."""
    body: msgspec.Raw


class FleetOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `finished` for a command sent to workers: each one's ending, and who is missing."""

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
    steps: Natural = 0
    """Engine steps so far."""
    free: Natural = 0
    """Requests that it would take now: its credit."""
    n_outbox: Natural = 0
    """Endings at it that their client has not acknowledged."""
    counters: Counters = msgspec.field(default_factory=dict[str, int])
    """What its process has counted since it started."""
    durations: DurationsByName = msgspec.field(default_factory=dict[str, Durations])
    """What it has measured since then."""


class StoreStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weight store, as the router sees it."""

    name: Short
    beat_age_ms: int
    """Since its last heartbeat."""
    gauges: Gauges = msgspec.field(default_factory=dict[str, float])
    """Figures of the moment, as it told them."""
    counters: Counters = msgspec.field(default_factory=dict[str, int])
    """What its process has counted since it started."""


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
    absent: Troubles = msgspec.field(default_factory=dict[str, str])
    """Workers that are expected and not here -> why not."""
    store: StoreStatus | None = None
    """None: none is connected."""
    tags: VersionsByPolicy = msgspec.field(default_factory=dict[str, int])
    """Per policy, the trainer's label of the latest committed version that bears one."""
    standby: Literal["", "ready", "missing"] = ""
    """Whether another router stands by for this one; empty: it was told of none, and none is
    here."""
