"""Control of engines and of the fleet: pause, memory, cache, status, life cycle.

Spec: docs/protocol.md, "Control".
"""

from typing import Literal

import msgspec

PauseMode = Literal["abort", "in_place", "retract", "drain"]
MemoryTag = Literal["weights", "kv_cache"]


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stop sampling between two engine steps; no new request is dispatched to the worker."""

    mode: PauseMode = "in_place"


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Go on after a pause."""


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Release memory by tag; the worker must be idle or paused with `abort`."""

    tags: list[MemoryTag]


class WakeUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take released memory back by tag."""

    tags: list[MemoryTag]


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `sleep` and `wake_up`."""

    size_bytes: dict[str, int]
    """Per tag, released or taken back."""
    asleep: list[str]
    """Tags released now."""


class FlushCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget cached prefixes that no request uses."""


class Flushed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `flush_cache`."""

    n_tokens: int


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Finish what runs (`drain`) or end it, then leave."""

    drain: bool = True


class ServerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask a worker for its engine's facts and counters."""


class ServerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `server_info`."""

    engine: str
    version: int
    state: str
    steps: int
    n_running: int
    n_waiting: int
    n_kv_tokens: int
    vocab_size: int
    max_context: int
    slots: int


class WorkerOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's ending of a fleet command."""

    worker: str
    kind: str
    """`finished`, `failed`, `cancelled`, `expired` or `refused`."""
    body: msgspec.Raw


class FleetOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `finished` for a command sent to workers: one ending each, and who is missing."""

    results: list[WorkerOutcome]
    silent: list[str]
    """Workers that had not answered at the deadline, or were lost while it ran."""


class OpenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reserve a sticky place for a session (optional: the first `generate` also does)."""

    session: str


class CloseSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forget a session's place."""

    session: str


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask the router for its table."""


class WorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the router's table."""

    name: str
    epoch: str
    state: str
    policy: str
    version: int
    engine: str
    slots: int
    n_running: int
    n_tokens: int
    beat_age_ms: int
    stalled_ms: float
    pid: int


class FleetStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `status`."""

    router_epoch: int
    instance: str
    recovering: bool
    workers: list[WorkerStatus]
    committed: dict[str, int]
    """Last committed version per policy."""
    n_queued: int
    n_running: int
    n_clients: int
    counters: dict[str, int]
