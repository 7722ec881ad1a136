"""What the drill and its trainer say to each other, a line of JSON each."""

from typing import Literal

import msgspec

from rolloutbus.bus.wire.messages.weights import InFlight, TransportChoice, UpdateMode
from rolloutbus.trainer_adapter.publisher.transfer import TransferPhase
from tests.drills.chaos.records import PublicationOutcome


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Publish once."""

    value: float
    """Of every element of the new weights."""
    transport: TransportChoice = "auto"
    mode: UpdateMode = "staged"
    in_flight: InFlight = "keep"
    require: str = "any"


Forget = Literal["forget"]
"""Give back what is kept from one publication to the next."""


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the publication is; with an outcome the last word on it."""

    phase: TransferPhase
    version: int = 0
    n_prepared: int = 0
    n_active: int = 0
    outcome: PublicationOutcome | None = None
    by: dict[str, str] = {}
    """Worker -> transport by which it got the bytes; of a committed one."""
    why: str = ""


class TrainerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a trainer is told at its start."""

    endpoint: str
    history: str
    """The file that gets what it knows of its versions."""
    deadline_s: float
    """Of each publication."""
    exit_with_parent: bool = True
