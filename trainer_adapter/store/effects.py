"""What the store core asks its shell to do; effects of one call are carried out in order."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.trainer_adapter.store.versions import Asker, DeltaKey, Record, VersionKey

AnswerKind = Literal["finished", "failed", "refused", "manifest", "delta"]


class StoreAnswer(NamedTuple):
    """Send the answer to the asker."""

    asker: Asker
    kind: AnswerKind
    body: msgspec.Struct


class Persist(NamedTuple):
    """Write this down durably before going on."""

    record: Record


class Allocate(NamedTuple):
    """Take a segment and report `allocated` or `allocation_failed`."""

    key: VersionKey
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the segment's bytes with the digests of `tensors`, and report `verified`."""

    key: VersionKey
    segment: str
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True)
class VerifyEarly:
    """Compare bytes with the digests of `tensors` while others are written.

    Runs beside everything else, and reports `verified_early`.
    """

    key: VersionKey
    segment: str
    tensors: dict[int, Tensor]
    """By their places in the manifest."""


class Freeze(NamedTuple):
    """The segment is written: let readers pin it."""

    segment: str


class Release(NamedTuple):
    """No version lies in this segment any more."""

    segment: str
    is_reusable: bool
    """False: somebody may still be writing to it."""


class SendSegmentChunk(NamedTuple):
    """Answer with these bytes of the segment."""

    asker: Asker
    segment: str
    offset: int
    size_bytes: int


class WriteChunk(NamedTuple):
    """Put bytes into the segment, then answer `finished`."""

    asker: Asker
    segment: str
    offset: int
    content: bytes


class MakeAhead(NamedTuple):
    """Have a segment for another version of this size, soon and beside everything else."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class MakeDelta:
    """Compare two sealed versions and report `delta_made`."""

    key: DeltaKey
    base_segment: str
    base_tensors: list[Tensor]
    segment: str
    tensors: list[Tensor]


class SendDeltaChunk(NamedTuple):
    """Answer with these bytes of a delta that was made."""

    asker: Asker
    key: DeltaKey
    offset: int
    size_bytes: int


class ForgetDelta(NamedTuple):
    """Its bytes are not asked for any more."""

    key: DeltaKey


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """Write a sealed version into its directory, and report `files_written`."""

    key: VersionKey
    segment: str
    tensors: list[Tensor]


class RemoveFiles(NamedTuple):
    """The version's directory, if it has one, is not needed any more."""

    key: VersionKey


StoreEffect = (
    StoreAnswer
    | Persist
    | Allocate
    | Verify
    | VerifyEarly
    | Freeze
    | Release
    | MakeAhead
    | SendSegmentChunk
    | WriteChunk
    | MakeDelta
    | SendDeltaChunk
    | ForgetDelta
    | WriteFiles
    | RemoveFiles
)
