"""The stage that spreads load: the less loaded of two random workers that have a free slot.

Where no slot is free it is two that have a place in their queue. Both kinds are kept in a list per
policy and version, so a choice costs the same with 8 workers and with 1,000. A session or a group
stays where its first request goes: there the choice is among more, and numbers of requests count.
"""

from rolloutbus.bus.backoff import Chance
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request

LASTING = 8
"""Workers that are compared for a session or a group, at most."""
REQUEST_COST = 8192
"""Tokens that each request under way counts beside its own, where a session or a group begins. By
their own alone a few groups with long prompts, which are computed once, keep all others off a
worker: agents took 1.07 times as long in simulated fleets. By numbers alone long contexts meet
where there is no room for them: sessions of which a fifth had 60,000 tokens took up to 2.8 times as
long."""


class LoadStage:
    """The last stage of placement: takes any worker that may serve the request."""

    def __init__(self, context: Context, chance: Chance) -> None:
        self._context = context
        self._free = context.eligibility.free
        self._chance = chance

    def choose(self, _rest: Rest, request: Request, _now: float) -> MemberRecord | None:
        """The least loaded of some that the version rule allows, or the only one."""
        rule, place = request.rule, request.place
        free = self._free.get(place.policy)
        if free is None:
            return None
        lists = free.slots.lists or free.queues.lists
        if rule is not None:
            committed = self._context.committed_of(place.policy)
            for places in (free.slots.by_version, free.queues.by_version):
                lists = [
                    each for version, each in places.items() if rule.accepts(version, committed)
                ]
                if lists:
                    break
        if place.session or place.group:
            return self._least_loaded(lists)
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

    def _least_loaded(self, lists: list[list[MemberRecord]]) -> MemberRecord | None:
        """Of as many as are compared, other ones each time."""
        count = sum(map(len, lists))
        start = int(self._chance.random() * count)
        some = (_at(lists, (start + n) % count) for n in range(min(count, LASTING)))
        return min(some, key=_lasting_load, default=None)


def _lasting_load(worker: MemberRecord) -> int:
    return REQUEST_COST * len(worker.requests) + worker.outstanding_cost


def _at(lists: list[list[MemberRecord]], index: int) -> MemberRecord:
    """The worker at this place of all lists, one behind the other."""
    for workers in lists:
        if index < len(workers):
            return workers[index]
        index -= len(workers)
    raise IndexError(index)
