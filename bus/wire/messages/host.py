"""Between a worker actor and its engine host, the supervised child that holds the engine.

Commands travel with the same kinds as on the bus; `deltas` carry each engine step.
Spec: docs/protocol.md, "Engine host".
"""

import msgspec

from rolloutbus.bus.wire.limits import (
    AttemptId,
    Counters,
    EosTokenIds,
    HeaderText,
    KindNames,
    Labels,
    Natural,
    Reasons,
    Rid,
    Sentence,
    Short,
)
from rolloutbus.bus.wire.messages.generation import Array, Arrays


class EngineStarting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the host is doing until the engine is ready, for people who wait."""

    doing: Short
    """Such as `loading weights`."""


class EngineReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine is built and will take work."""

    engine: Short
    vocab_size: Natural
    max_context: Natural
    slots: Natural
    eos_token_ids: EosTokenIds
    capabilities: KindNames
    """Command kinds that this engine can do."""
    host: HeaderText = ""
    """As in `WorkerFacts`, like those that follow."""
    gpus: KindNames = msgspec.field(default_factory=list[str])
    bulk: HeaderText = ""
    transports: KindNames = msgspec.field(default_factory=list[str])
    features: KindNames = msgspec.field(default_factory=list[str])
    """What a `generate` may ask for; see "Generation"."""
    parallel: Counters = msgspec.field(default_factory=dict[str, int])
    """As in `ServerFacts`, like those that follow."""
    software: Labels = msgspec.field(default_factory=dict[str, str])
    adapters: Counters = msgspec.field(default_factory=dict[str, int])
    lost: Reasons = msgspec.field(default_factory=dict[str, str])
    """Features that what is installed cannot carry, and why. `processor:*`: all processors."""


class EngineFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine could not be built or has broken; the host exits next."""

    message: Sentence


class EngineHeartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every 0.25 s: counters, read by the loop that answers commands."""

    steps: Natural
    n_running: Natural
    n_waiting: Natural
    n_kv_tokens: Natural
    version: Natural
    torn: bool = False
    """Its weights are being overwritten, or half overwritten: of no version."""
    n_held: Natural = 0
    """Of those that wait: what they need is still made. No steps come of them alone."""


class Extras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """More of a request: its adapter before its first tokens, or its arrays before it finishes."""

    rid: Rid
    attempt: AttemptId
    arrays: Arrays = msgspec.field(default_factory=dict[str, Array])
    lora: Short = ""
    """`NAME@VERSION` of the adapter that the engine gave it; empty: nothing new is said of it."""
