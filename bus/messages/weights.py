"""Weight versions: reserved and sealed in the store, published by the router, pulled by workers.

Spec: docs/protocol.md, "Weights".
"""

from typing import Literal

import msgspec

InFlight = Literal["finish_old", "in_place", "retract", "abort"]


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One tensor of a version, at a byte range of its segment."""

    name: str
    dtype: str
    """safetensors name: F32, BF16, F16, F64, I64, I32, U8, …."""
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    digest: int = 0
    """xxh3-64 of the bytes; 0 until sealed."""


class ReserveVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: assign the next version and room for its bytes. Ends with `Reserved`."""

    policy: str
    tensors: list[Tensor]


class Reserved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the trainer writes: a shared-memory segment on the store's host."""

    version: int
    host: str
    """Identity of the store's host; elsewhere the bytes must be pushed over `bulk`."""
    segment: str
    size_bytes: int


class SealVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: all bytes are written; verify these digests and freeze the version."""

    policy: str
    version: int
    digests: list[int]
    """xxh3-64 per tensor, in manifest order."""


class PublishVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to router: bring a sealed version to every worker of the policy as a transaction."""

    policy: str
    version: int
    in_flight: InFlight = "in_place"
    require: str = "any"
    """Success rule: `all`, `quorum` or `any` (at least one worker)."""


class WorkerUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the update went on one worker."""

    worker: str
    is_active: bool
    stall_ms: float = 0.0
    problem: str = ""


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `publish_version`: committed; workers not active are quarantined."""

    version: int
    workers: list[WorkerUpdate]


class PrepareUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: pull this version from the store and verify it. Ends with `Prepared`."""

    policy: str
    version: int
    bulk: str
    """Store endpoint to pull from."""


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes are staged beside the old weights and their digests were verified."""

    version: int
    size_bytes: int
    transport: str
    """`shm` or `tcp`."""
    pull_ms: float


class CommitUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: swap to the staged version between two steps. Ends with `Committed`."""

    policy: str
    version: int
    in_flight: InFlight


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version is active on this worker."""

    version: int
    stall_ms: float
    n_retracted: int = 0
    n_aborted: int = 0


class AbortUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: drop what was staged."""

    policy: str
    version: int


class RecordCommit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to store: write the decision to commit durably. Ends with `Done`."""

    policy: str
    version: int


class PullManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker to store (bulk socket): what is in this version? Answered by `manifest`."""

    policy: str
    version: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sealed version: its tensors, and where its bytes lie."""

    policy: str
    version: int
    host: str
    segment: str
    size_bytes: int
    tensors: list[Tensor]


class PullChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker to store (bulk socket): a byte range, at most 4 MiB. Answered by `chunk`."""

    policy: str
    version: int
    offset: int
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to `pull_chunk`, in a detached body."""

    offset: int
    content: bytes


class PushChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer on another host to store (bulk socket): bytes of a reserved version."""

    policy: str
    version: int
    offset: int
    content: bytes
