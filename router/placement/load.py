"""The stage that spreads load: the less loaded of two random workers that have a free slot.

Where no slot is free it is two that have a place in their queue. Both kinds are kept in a list per
policy and version, so a choice costs the same with 8 workers and with 1,000.
"""

from rolloutbus.bus.backoff import Chance
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request


class LoadStage:
    """The last stage of placement: takes any worker that may serve the request."""

    def __init__(self, context: Context, chance: Chance) -> None:
        self._context = context
        self._free = context.eligibility.free
        self._chance = chance

    def choose(self, _rest: Rest, request: Request, _now: float) -> MemberRecord | None:
        """The less loaded of two that the version rule allows, or the only one."""
        rule = request.rule
        free = self._free.get(request.place.policy)
        if free is None:
            return None
        lists = free.slots.lists or free.queues.lists
        if rule is not None:
            committed = self._context.committed_of(request.place.policy)
            for places in (free.slots.by_version, free.queues.by_version):
                lists = [
                    each for version, each in places.items() if rule.accepts(version, committed)
                ]
                if lists:
                    break
        if len(lists) == 1:  # mostly: all have the same weights
            [workers] = lists
            count = len(workers)
            if count == 1:
                return workers[0]
            one, other = divmod(int(self._chance.random() * count * (count - 1)), count - 1)
            first, second = workers[one], workers[other if other < one else other + 1]
        else:
            count = sum(map(len, lists))
            if not count:
                return None
            one, other = divmod(int(self._chance.random() * count * (count - 1)), count - 1)
            first, second = _at(lists, one), _at(lists, other if other < one else other + 1)
        return second if second.outstanding_cost < first.outstanding_cost else first


def _at(lists: list[list[MemberRecord]], index: int) -> MemberRecord:
    """The worker at this place of all lists, one behind the other."""
    for workers in lists:
        if index < len(workers):
            return workers[index]
        index -= len(workers)
    raise IndexError(index)
