"""Between a worker actor and its engine host, the supervised child that holds the engine.

Commands travel with the same kinds as on the bus; `deltas` carry each engine step.
Spec: docs/protocol.md, "Engine host".
"""

import msgspec


class EngineReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine is built and will take work."""

    engine: str
    vocab_size: int
    max_context: int
    slots: int
    eos_token_ids: list[int]
    capabilities: list[str]
    """Command kinds that this engine can do."""


class EngineFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine could not be built or has broken; the host exits next."""

    message: str


class EngineBeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every 0.25 s: counters, read by the loop that answers commands."""

    steps: int
    n_running: int
    n_waiting: int
    n_kv_tokens: int
    version: int
