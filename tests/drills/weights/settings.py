"""What a drill of weight updates is told."""

from typing import Annotated

import msgspec

from tests.drills.weights.cases import N_CELLS

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class WeightDrillSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run."""

    seed: int
    cases: Positive = N_CELLS
    """Updates in which somebody dies; the whole matrix if absent."""
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Leave so many cases of this seed out: to repeat a single one."""
    open_requests: Positive = 24
    workers: Positive = 3
    deadline_s: Seconds = 90.0
    """Of each request; one that needs longer counts as lost."""
    update_deadline_s: Seconds = 120.0
    """Of each publication."""
    directory: str = ""
    """Gets histories and logs, and keeps them; empty: they are thrown away."""
