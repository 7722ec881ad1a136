"""Weight versions: reserved and sealed in the store, published by the router, pulled by workers.

Spec: docs/protocol.md, "Weights".
"""

from typing import Annotated, Literal

import msgspec

from rolloutbus.bus.wire.limits import (
    MAX_BUCKETS,
    MAX_HANDLE_BYTES,
    MAX_KINDS,
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

InFlight = Literal["finish_old", "keep", "retract", "abort"]
UpdateMode = Literal["staged", "overwrite"]
Transport = Literal["shm", "tcp", "delta", "disk", "cuda_ipc", "collective"]
TransportChoice = Literal["auto", "shm", "tcp", "delta", "disk", "cuda_ipc", "collective"]
UpdatePhase = Literal["preparing", "recording", "committing", "committed", "aborted", "unknown"]


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


class Bucket(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A run of whole tensors of a version that moves as one piece."""

    start: Natural
    """First byte within the version."""
    size_bytes: Natural
    checksum: Natural
    """`bus.weights.manifest.checksum` of the bytes: what a GPU can compute, unlike a digest."""
    handle: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDLE_BYTES)] = b""
    """How another process opens it; its meaning is the transport's."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Another way to the bytes of a version than the store's segment, while its owner lives."""

    transport: Transport
    at: HeaderText
    """`cuda_ipc`: UUID of the GPU; `collective`: `host:port` of the rendezvous; `disk`: directory,
    relative to a root that both sides know."""
    host: HeaderText = ""
    """Identity of the owner's host; empty: any host can take it."""
    backend: Short = ""
    """`collective`: `gloo` or `nccl`."""
    buckets: Annotated[list[Bucket], msgspec.Meta(max_length=MAX_BUCKETS)] = []
    router: Short = ""
    """`collective`: instance of the only router that may make a group of it; empty: any."""


Offers = Annotated[list[Offer], msgspec.Meta(max_length=MAX_KINDS)]


class ReserveVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: assign the next version and room for its bytes. Ends with `Reserved`."""

    policy: Short
    tensors: Tensors
    version: Natural = 0
    """The number that it is to have, above all before; 0: the next one."""
    above: Natural = 0
    """Router: numbers up to this one are taken in this fleet, whatever the store's record says."""


class Reserved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place to write to: a shared-memory segment on the store's host."""

    version: Natural
    host: HeaderText
    """Identity of the store's host; elsewhere the bytes must be pushed over `bulk`."""
    segment: HeaderText
    size_bytes: Natural


class VerifyTensors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: these tensors are written; verify them while others are.

    Only saves time: the seal tells of wrong bytes, and does without. Whoever has said so does not
    write them again.
    """

    policy: Short
    version: Natural
    numbers: Annotated[list[Natural], msgspec.Meta(max_length=MAX_TENSORS)]
    """Places in the manifest."""
    digests: Digests
    """xxh3-64 of each of them."""


class SealVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: all bytes are written; verify these digests and freeze the version."""

    policy: Short
    version: Natural
    digests: Digests
    """xxh3-64 per tensor, in manifest order."""
    offers: Offers = []
    """Other ways to the same bytes."""
    allow_zeros: bool = False
    """Tensors that have become all zero are meant to be."""


class RestoreVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to store: a new version with the content of an old one that is still kept.

    The way back: numbers never fall. Ends with `VersionRestored`.
    """

    policy: Short
    version: Natural
    """Whose content is wanted again."""
    above: Natural = 0
    """Router: numbers up to this one are taken in this fleet, whatever the store's record says."""


class VersionRestored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new version is sealed and can be published."""

    version: Natural


class SettleVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Client or router to store: a version is done with, if it has not been committed.

    Then it never will be, and its bytes are given back. Ends with `Settled`.
    """

    policy: Short
    version: Natural


class Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The final fate of a version."""

    is_committed: bool


class PublishVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer to router: bring a sealed version to every worker of the policy as a transaction."""

    policy: Short
    version: Natural
    in_flight: InFlight = "keep"
    require: Short = "any"
    """Success rule: `all`, `quorum`, `any` (at least one worker) or `at-least:N`."""
    transport: TransportChoice = "auto"
    """`auto`: each worker by its locality."""
    mode: UpdateMode = "staged"
    """`overwrite`: nothing is held beside the old weights; a worker is torn while it pulls."""
    floor: Natural = 0
    """Workers that go on serving while others commit: the commit goes in waves. 0: all at once."""
    offers: Offers = []
    """The offers sealed with it, without their buckets."""
    tag: Natural | None = None
    """The trainer's own label, above that of the version before it; None: none of its own."""


class WorkerUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Outcome of the update on one worker."""

    worker: Short
    is_active: bool
    stall_ms: float = 0.0
    problem: Sentence = ""
    transport: Short = ""
    """By which it got the bytes."""
    moved_bytes: Natural = 0
    """That crossed a link for it."""
    why: Sentence = ""
    """Why this transport."""


class UpdateProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Router to the publishing client, under the rid of its command: how far it has come."""

    version: Natural
    phase: UpdatePhase
    n_targets: Natural
    n_prepared: Natural = 0
    n_active: Natural = 0
    update: Short = ""
    """Name of this try; another one: it began again."""


class UpdateStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An update under way, as `status` shows it."""

    policy: Short
    version: Natural
    phase: UpdatePhase
    age_ms: Natural
    n_targets: Natural
    n_prepared: Natural = 0
    n_active: Natural = 0
    is_catch_up: bool = False


class VersionPublished(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `publish_version`: committed; workers not active are quarantined."""

    version: Natural
    workers: Annotated[list[WorkerUpdate], msgspec.Meta(max_length=MAX_MEMBERS)]


class PrepareUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: get this version and verify it. Ends with `Prepared`."""

    policy: Short
    version: Natural
    bulk: HeaderText
    """Store endpoint: where the manifest is, and the bytes when every other way fails."""
    transport: Transport = "shm"
    """The way to try first; from another host `shm` means `tcp`."""
    sources: Annotated[list[HeaderText], msgspec.Meta(max_length=MAX_KINDS)] = []
    """`tcp`, and `delta` if it comes to that: bulk endpoints of workers that will hold it, to be
    asked before the store."""
    mode: UpdateMode = "staged"
    rank: Natural = 0
    """`collective`: this worker's; the trainer has 0."""
    world: Natural = 0
    """`collective`: ranks in all, the trainer among them."""


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes are staged beside the old weights and their digests were verified."""

    version: Natural
    size_bytes: Natural
    transport: Short
    """The way they came; empty if the version was active already."""
    pull_ms: float
    moved_bytes: Natural = 0
    """That crossed a link to come here."""
    why: Sentence = ""
    """Why not by the transport that was asked for, or not from its first source."""


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
    floor: Natural = 0
    """Above 0: it is committed in waves, and so many workers have to serve meanwhile; 0: at once,
    or the waves are through."""
    is_adapter: bool = False
    """`policy` is `<policy>.<adapter>`: all workers of the former are to have this version of the
    adapter; version 0: none any more."""
    tag: Natural | None = None
    """The trainer's own label of it, if it has one."""


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
    offers: Offers = []
    allow_zeros: bool = False
    """Tensors that are all zero are meant to be, or were when this content was committed."""


class PullDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker to store (bulk socket): what changed since `base`? Answered by `delta`."""

    policy: Short
    version: Natural
    base: Natural
    """The version whose bytes the asker has."""


class DeltaPart(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Instructions to make one tensor from its base."""

    tensor: Natural
    """Index in the manifest; tensors without a part are unchanged."""
    encoding: Short
    """`full`, `sparse` or `xor`; see "Deltas"."""
    offset: Natural
    """First byte within the delta."""
    size_bytes: Natural


class WeightDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of a delta; its bytes are pulled in chunks that name the base."""

    policy: Short
    version: Natural
    base: Natural
    size_bytes: Natural
    parts: Annotated[list[DeltaPart], msgspec.Meta(max_length=MAX_TENSORS)]


class PullChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Worker to store (bulk socket): a byte range, at most 4 MiB. Answered by `chunk`."""

    policy: Short
    version: Natural
    offset: Natural
    size_bytes: Natural
    base: Natural = 0
    """Above 0: a range of the delta from this version, not of the version itself."""


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


class CheckWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To workers: digests of the weights that are active. Ends with `CheckedWeights`."""

    names: Annotated[list[TensorName], msgspec.Meta(max_length=MAX_TENSORS)] = []
    """Empty: all."""


class TensorCheck(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """Content of one active tensor."""

    name: TensorName
    digest: Natural
    """xxh3-64 of its bytes, as in a manifest."""
    n_not_finite: Natural
    """Elements that are infinite or NaN."""
    is_zero: bool
    """Every byte is 0."""


class CheckedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `check_weights`."""

    version: Natural
    tensors: Annotated[list[TensorCheck], msgspec.Meta(max_length=MAX_TENSORS)]


class GetWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To a worker: bytes of one active tensor, at most 4 MiB. Ends with `GotWeights`."""

    name: TensorName
    offset: Natural
    size_bytes: Natural


class GotWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `get_weights`."""

    version: Natural
    dtype: Short
    shape: Shape
    offset: Natural
    content: Content


class ListWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To a worker: which tensors does its engine take? Ends with `ListedWeights`."""


class TensorForm(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """What one tensor of a version must be."""

    name: TensorName
    dtype: Short
    """safetensors name, as of `Tensor`."""
    shape: Shape


class ListedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `list_weights`."""

    tensors: Annotated[list[TensorForm], msgspec.Meta(max_length=MAX_TENSORS)]
