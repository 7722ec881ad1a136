"""The isolation lane: a suspected request gets a worker to itself, one such worker per policy."""

from collections.abc import Iterable

from rolloutbus.router.context import Context
from rolloutbus.router.health.suspicion import Suspicions
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request


class Isolation:
    """Sets workers aside for suspects, and gives them back."""

    def __init__(self, context: Context, suspicions: Suspicions) -> None:
        self._context = context
        self._eligibility = context.eligibility
        self._suspicions = suspicions
        self._set_aside: dict[str, MemberRecord] = {}

    def choose(self, rest: Rest, request: Request, now: float) -> MemberRecord | None:
        """An empty worker that gets nothing else for a suspect; None while it becomes empty."""
        if not request.is_suspect:
            return rest(request, now)
        policy = request.place.policy
        worker = self._set_aside.get(policy)
        if worker is not None and not self._serves(worker, request):
            if worker.requests:
                return None
            self._give_back(policy)
            worker = None
        if worker is None:
            worker = self._emptiest(request)
            if worker is None:
                return None
            self._set_aside[policy] = worker
            self._eligibility.block(worker, Reason.SET_ASIDE)
        if worker.requests:
            return None
        self._context.count("isolated")
        return worker

    def tick(self, waiting: Iterable[Request]) -> None:
        """Give back workers that no suspect uses or waits for, and forget those that are gone."""
        if not self._set_aside:
            return
        waiting_policies = {each.place.policy for each in waiting if each.is_suspect}
        for policy, worker in list(self._set_aside.items()):
            is_gone = Reason.GONE in worker.blocked_by
            if is_gone or (policy not in waiting_policies and not worker.requests):
                self._give_back(policy)

    def _give_back(self, policy: str) -> None:
        self._eligibility.unblock(self._set_aside.pop(policy), Reason.SET_ASIDE)

    def _serves(self, worker: MemberRecord, request: Request) -> bool:
        """Whether it can take the request, and no witness that is less partial can.

        Two crashes on one worker may be the worker's fault: the second run is another's if any is
        there.
        """
        if not self._suits(worker, request):
            return False
        partial = self._suspicions.crashed_alone_on(request.rid)
        if worker.name not in partial:
            return True
        others = self._eligibility.workers(request.place.policy)
        return all(each.name in partial or not self._suits(each, request) for each in others)

    def _suits(self, worker: MemberRecord, request: Request) -> bool:
        return (
            worker.is_fit
            and request.place.worker in ("", worker.name)
            and self._context.may_serve(worker, request.rule)
        )

    def _emptiest(self, request: Request) -> MemberRecord | None:
        workers = self._eligibility.workers(request.place.policy)
        suitable = [each for each in workers if self._suits(each, request)]
        partial = self._suspicions.crashed_alone_on(request.rid)
        return min(
            suitable, key=lambda each: (each.name in partial, len(each.requests)), default=None
        )
