"""What the store writes down for good: one struct per fact, tagged with a literal name."""

import msgspec

from rolloutbus.bus.wire.messages.membership import Intent
from rolloutbus.bus.wire.messages.weights import Tensor


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A store process took over the ledger."""

    owner: str
    """In the names of all segments it makes."""


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """This number is taken for ever, whatever becomes of the version."""

    policy: str
    version: int


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """The bytes were verified and lie in this segment."""

    policy: str
    version: int
    segment: str
    tensors: list[Tensor]
    """With digests."""
    allow_zeros: bool = False
    """Tensors of zeros in it are not to be judged."""


class CommitRecord(msgspec.Struct, frozen=True, tag="committed"):
    """The router decided: this is the version that the policy is served with."""

    policy: str
    version: int
    before: int = 0
    """The version committed before it, while it is committed in waves."""
    floor: int = 0
    """Workers that serve meanwhile; 0: it is committed at once, or the waves are through."""
    is_adapter: bool = False
    """It is a version of an adapter that all workers are to have; version 0: none is."""


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """The bytes are gone."""

    policy: str
    version: int


class Intended(msgspec.Struct, frozen=True, tag="intended"):
    """What the fleet is to be, as the router told last: its identity, and who is paused."""

    intent: Intent


Record = Opened | Assigned | Sealed | CommitRecord | Retired | Intended
