"""The stage that spreads load: the less loaded of two random workers that have a free place.

Workers with a free place are kept in one list per policy, so a choice costs the same with 8
workers and with 1,000, unless few of them have the weights that a request asks for.
"""

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request

MAX_DRAWS = 16
"""Workers that are drawn before all are looked at. Where half of them have the weights, two are
found among so many but for once in 3,900 times."""


class LoadStage:
    """The last stage of placement: takes any worker that may serve the request."""

    def __init__(self, context: Context, chance: Chance) -> None:
        self._context = context
        self._free = context.eligibility.free
        self._chance = chance

    def choose(self, _rest: Rest, request: Request, _now: float) -> MemberRecord | None:
        """The less loaded of two random workers that the version rule allows."""
        policy, rule = request.place.policy, request.rule
        free = self._free.get(policy)
        if free is None:
            return None
        workers = free.workers
        if rule is not None:
            committed = self._context.committed_of(policy)
            worker = self._drawn(workers, rule, committed)
            if worker is not None:
                return worker
            workers = [w for w in workers if rule.accepts(w.version, committed)]
        count = len(workers)
        if count < 2:  # noqa: PLR2004 - two choices need two workers
            return workers[0] if workers else None
        one, other = divmod(int(self._chance.random() * count * count), count)
        first, second = workers[one], workers[other]
        return second if second.outstanding_cost < first.outstanding_cost else first

    def _drawn(
        self, workers: list[MemberRecord], rule: VersionRule, committed: int
    ) -> MemberRecord | None:
        """The same without a look at every worker; None if few of them are allowed.

        Whoever is drawn and not allowed is drawn again, so each of the others is as likely as in
        a list of those alone.
        """
        count, random = len(workers), self._chance.random
        first: MemberRecord | None = None
        for _ in range(min(count, MAX_DRAWS)):
            worker = workers[int(random() * count)]
            if not rule.accepts(worker.version, committed):
                continue
            if first is not None:
                return worker if worker.outstanding_cost < first.outstanding_cost else first
            first = worker
        return None
