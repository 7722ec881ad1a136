"""Weight versions: reserved and sealed in the store, published by the router, pulled by workers.

Spec: docs/protocol.md, "Weights".
"""

from typing import Annotated, Literal

import msgspec

from bus.messages.limits import (
    MAX_MEMBERS,
    MAX_TENSORS,
    Content,
    Digests,
    HeaderText,
    Natural,
    Sentence,
    Shape,
    Short,
    TensorName,
)

InFlight = Literal["finish_old", "in_place", "retract", "abort"]


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One tensor of a version, at a byte range of its segment."""

    name: TensorName
    dtype: Short
    """safetensors name: F32, BF16, F16, F64, I64, I32, U8, …."""
    shape: Shape
    offset: Natural
    size_bytes: Natural
    digest: Natural = 0
    """xxh3-64 of the bytes; 0 until sealed."""


Tensors = Annotated[list[Tensor], msgspec.Meta(max_length=MAX_TENSORS)]


class ReserveVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: assign the next version and room for its bytes. Ends with `Reserved`."""

    policy: Short
    tensors: Tensors


class Reserved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the trainer writes: a shared-memory segment on the store's host."""

    version: Natural
    host: HeaderText
    """Identity of the store's host; elsewhere the bytes must be pushed over `bulk`."""
    segment: HeaderText
    size_bytes: Natural


class SealVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: all bytes are written; verify these digests and freeze the version."""

    policy: Short
    version: Natural
    digests: Digests
    """xxh3-64 per tensor, in manifest order."""


class PublishVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to router: bring a sealed version to every worker of the policy as a transaction."""

    policy: Short
    version: Natural
    in_flight: InFlight = "in_place"
    require: Short = "any"
    """Success rule: `all`, `quorum` or `any` (at least one worker)."""


class WorkerUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the update went on one worker."""

    worker: Short
    is_active: bool
    stall_ms: float = 0.0
    problem: Sentence = ""


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `publish_version`: committed; workers not active are quarantined."""

    version: Natural
    workers: Annotated[list[WorkerUpdate], msgspec.Meta(max_length=MAX_MEMBERS)]


class PrepareUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: pull this version from the store and verify it. Ends with `Prepared`."""

    policy: Short
    version: Natural
    bulk: HeaderText
    """Store endpoint to pull from."""


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes are staged beside the old weights and their digests were verified."""

    version: Natural
    size_bytes: Natural
    transport: Short
    """`shm` or `tcp`."""
    pull_ms: float


class CommitUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: swap to the staged version between two steps. Ends with `Committed`."""

    policy: Short
    version: Natural
    in_flight: InFlight


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version is active on this worker."""

    version: Natural
    stall_ms: float
    n_retracted: Natural = 0
    n_aborted: Natural = 0


class AbortUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: drop what was staged."""

    policy: Short
    version: Natural


class RecordCommit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to store: write the decision to commit durably. Ends with `Done`."""

    policy: Short
    version: Natural


class PullManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker to store (bulk socket): what is in this version? Answered by `manifest`."""

    policy: Short
    version: Natural


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sealed version: its tensors, and where its bytes lie."""

    policy: Short
    version: Natural
    host: HeaderText
    segment: HeaderText
    size_bytes: Natural
    tensors: Tensors


class PullChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker to store (bulk socket): a byte range, at most 4 MiB. Answered by `chunk`."""

    policy: Short
    version: Natural
    offset: Natural
    size_bytes: Natural


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to `pull_chunk`, in a detached body."""

    offset: Natural
    content: Content


class PushChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer on another host to store (bulk socket): bytes of a reserved version."""

    policy: Short
    version: Natural
    offset: Natural
    content: Content
