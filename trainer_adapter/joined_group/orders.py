"""What a member of a trainer's group is asked for.

`Receive` and `Answer` are lines of JSON to and from the process that is in the group.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from rolloutbus.bus.wire.messages.weights import InFlight, TensorForm

Backend = Literal["gloo", "nccl"]


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which group to join, and as whom."""

    name: str
    """Of the group; its other ranks call it so, too."""
    address: str
    """IP address of rank 0, whose store all ranks meet in."""
    port: int
    rank: int
    world_size: int
    backend: Backend
    timeout_s: float
    """For all ranks to come."""

    @property
    def url(self) -> str:
        """Of the store, as torch has it."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


class Bucket(NamedTuple):
    """Tensors that rank 0 broadcasts next."""

    forms: Sequence[TensorForm]
    """In its order."""
    packed_bytes: int | None = None
    """See `plan_of`."""


class PublishRules(NamedTuple):
    """How a version is to be published."""

    in_flight: InFlight
    allow_zeros: bool = False


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One broadcast of rank 0."""

    dtype: str
    """torch's name."""
    start: int
    """Its first byte in the bucket; a multiple of the size of an element."""
    n_elements: int


class Receive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take a bucket; the memory for it comes as a descriptor, beside this line."""

    size_bytes: int
    pieces: list[Piece]


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an order ended. One that answers none says why the group is over."""

    problem: str = ""
    """Empty: well."""
    is_unsupported: bool = False
    """It cannot be done on this host, whatever the trainer does."""
