"""Which worker gets a request: a list of stages, each of which decides or asks the rest.

A new policy is a file with one such function and one line in the list, in `router.core`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.requests.record import Request

Rest = Callable[[Request, float], MemberRecord | None]
"""(request, now) -> the worker that the stages after this one choose; None: it has to wait."""
Stage = Callable[[Rest, Request, float], MemberRecord | None]
"""(rest, request, now) -> a worker for the request, from `rest` if the stage has no view of it.

Whoever is returned is given the request at once. None: it waits, and is tried again when a worker
has been blocked, unblocked or freed."""


class Placer:
    """The stages as one function."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """The first of `stages` is asked first; the last one decides alone."""
        self.choose = _pipeline(stages)
        self._of_any = _pipeline(stages[-1:])

    def chooser(self, place: Placement, rule: VersionRule | None) -> Rest:
        """`choose` for a run of requests with this place, which are no suspects.

        Those that concern no other stage are the last one's.
        """
        is_plain = rule is None and not (
            place.session or place.group or place.marks or place.worker
        )
        return self._of_any if is_plain else self.choose


def _pipeline(stages: Sequence[Stage]) -> Rest:
    rest: Rest = _nobody
    for stage in reversed(stages):
        rest = partial(stage, rest)
    return rest


def _nobody(_request: Request, _now: float) -> MemberRecord | None:
    return None


def made_concrete(place: Placement, rule: VersionRule, committed: int) -> Placement:
    """What the worker checks: a rule that needs no ledger."""
    return Placement(
        place.policy,
        rule.concrete(committed),
        place.session,
        place.group,
        place.cost,
        place.priority,
        outlives_client=place.outlives_client,
    )
