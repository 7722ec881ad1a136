"""What must always be true, judged while it happens."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rolloutbus.bus.wire.entry import Attempt, Entry, Epoch
from rolloutbus.bus.wire.versions import VersionRule, parse_versions
from rolloutbus.router.members.records import MemberRecord
from tests.drills.simulation.peeks import (
    holds_lease,
    is_updating,
    router_epoch_of,
    router_of,
    version_of,
)
from tests.drills.simulation.process import TICK_S
from tests.drills.simulation.routers import RouterPair
from tests.drills.simulation.sim_client import Case
from tests.drills.simulation.sim_host import SimHost
from tests.drills.simulation.sim_router import RouterNode
from tests.drills.simulation.sim_worker import WorkerNode

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

ROUNDING_S = 0.002
"""Deadlines travel as whole milliseconds, at least one."""
CALM_SLACK_S = 0.6
"""A deadline may be passed by this much on a calm network: a tick, a step, a transit."""
FAULTY_SLACK_S = 15.0
"""Deadlines on the wire are durations: what holds a command up stretches them. The longest way:
3.5 s in a link before it breaks, 5 s in a frozen router, 3.5 s in the next link, 2.4 s in a
worker that is frozen and keeps its lease."""
STRANDED_S = 11.0
"""So much longer may a router of a pair be frozen."""
OVERTIME_S = 1.6
"""A client gives up this long after a deadline, and says so at a tick."""
NEWS_S = 1.0
"""The death of an engine is known at the router after this, or the word of it was lost."""
MAX_DEATHS = 4
"""Engines that one poisonous request may cost under one router."""


class Violation(NamedTuple):
    """Something that must never be."""

    oracle: str
    rid: str
    text: str

    def __str__(self) -> str:
        return f"{self.oracle}: {self.rid} {self.text}"


class Run(NamedTuple):
    """One execution of a request."""

    worker: WorkerNode
    host: SimHost | None
    epoch: Epoch

    def is_over(self, now: float) -> bool:
        """Whether its worker, engine or lease is gone, and the execution with it."""
        if not self.worker.is_alive or self.host is None or not self.host.is_alive:
            return True
        member = self.worker.core.member
        return member.epoch != self.epoch or not holds_lease(member, now)


class Oracles:
    """Looks after the requests, and keeps the counts that no product code shares."""

    def __init__(self, world: "World") -> None:
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.runs: dict[str, list[Run]] = {}
        """By rid."""
        self.failed_by_engine: set[str] = set()
        """rids that an engine answered with an error."""
        self.deaths: Counter[tuple[str, str]] = Counter()
        """(rid, router) -> engines that died of it, as far as this router could hear of it."""
        self.holders: dict[str, set[WorkerNode]] = {}
        """rid -> workers that sent an ending of it."""
        self._world = world
        self._obeyed: dict[tuple[WorkerNode, int], str] = {}
        """(worker, router epoch) -> instance of the router that it obeyed then."""
        self._executed: set[tuple[str, Attempt]] = set()
        self._placed_at: dict[tuple[str, str], tuple[int, str]] = {}
        """(rid, identity of the fleet) -> the newest weights that it was given to, by whom."""

    def broken(self, oracle: str, rid: str, text: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(oracle, rid, text))
        self._world.note(f"VIOLATION {oracle}: {rid} {text}")

    def placed(self, router: RouterNode, member: MemberRecord, rid: str, late_s: float) -> None:
        """A router gives a `generate` to a worker."""
        where = f"is placed on {member.name}"
        if late_s > TICK_S + ROUNDING_S:
            self.broken("not_expired", rid, f"{where} {late_s:.2f} s after its deadline")
        committed = router.core.context.committed_of(member.policy)
        if member.version < committed:
            text = f"{where}, at version {member.version} of {committed}"
            self.broken("serves_committed", rid, text)
        self._never_goes_back(router, member, rid)

    def began(self, worker: WorkerNode, entry: Entry) -> None:
        """A worker gave a `generate` to its engine."""
        now, rid = self._world.time.now, entry.rid
        member, where = worker.core.member, f"attempt {entry.attempt} on {worker.name}"
        self.runs.setdefault(rid, []).append(Run(worker, worker.host, member.epoch))
        if not holds_lease(member, now):
            self.broken("lease_held", rid, f"{where} begins without a lease")
        running = member.deliveries.running(rid)
        if running is not None and running.epoch != member.epoch:
            self.broken("current_epoch", rid, f"{where} was placed under another lease")
        if (rid, entry.attempt) in self._executed:
            self.broken("executed_once", rid, f"{where} was begun before")
        self._executed.add((rid, entry.attempt))
        router = router_of(member)
        if self._obeyed.setdefault((worker, router_epoch_of(member)), router) != router:
            self.broken("one_router", rid, f"{where} obeys a second router of one epoch")
        self._world.pauses.began(worker.name, entry)
        self._world.two_fleets.began(worker, entry)
        self._owns_alone(worker, rid, where)
        self._in_time(worker, rid, where)
        self._is_current(rid, entry, where)
        self._fits(worker, entry, where)

    def overran(self, worker: WorkerNode, rid: str, late_s: float) -> None:
        """A worker goes on with a request after its deadline."""
        self.broken("not_expired", rid, f"{worker.name} goes on {late_s:.2f} s after its deadline")

    def answered(self, worker: WorkerNode, entry: Entry) -> None:
        """A worker sends an ending, for the first time or again."""
        self.holders.setdefault(entry.rid, set()).add(worker)
        if not holds_lease(worker.core.member, self._world.time.now):
            self.broken("lease_held", entry.rid, f"{worker.name} answers without a lease")

    def took_dead(self, entry: Entry) -> None:
        """A client took the ending of an execution that it knew to be lost."""
        self.broken("stale_attempt", entry.rid, f"the ending of lost {entry.attempt} was taken")

    def completed(self, case: Case, rid: str) -> None:
        """A caller was given an outcome."""
        now = self._world.time.now
        if len(case.outcomes) > 1:
            self.broken("one_outcome", rid, f"{len(case.outcomes)} outcomes")
        case.ended_at = now
        case.behind_s = self._world.fleet_oracles.behind_s
        runs = self.runs.get(rid, ())
        is_over = any(run.is_over(now) or rid in run.worker.given_up for run in runs)
        case.was_lost = (
            is_over or self._world.routers.is_split
        )  # its worker may obey the other router
        late_s = now - max(case.gives_up_at, case.client.thawed_at)
        if late_s > OVERTIME_S:
            self.broken("ends_in_time", rid, f"ended {late_s:.2f} s after its deadline")

    def engine_failed(self, rid: str) -> None:
        """An engine reported an error instead of this request's tokens."""
        self.failed_by_engine.add(rid)

    def engine_struck(self, worker: WorkerNode, rid: str) -> None:
        """An engine died of this request."""
        instance = self._world.router.core.context.instance
        self._world.later(NEWS_S, lambda: self._count_death(worker.name, rid, instance))

    def _count_death(self, worker: str, rid: str, instance: str) -> None:
        health = self._world.health
        if health.is_touched("router") or health.is_touched(worker, few_lost=1):
            return  # its router may not have heard of it
        self.deaths[rid, instance] += 1
        if self.deaths[rid, instance] > MAX_DEATHS:
            self.broken("poison_found", rid, f"has killed {MAX_DEATHS} engines, and another one")

    def _never_goes_back(self, router: RouterNode, member: MemberRecord, rid: str) -> None:
        """Whether its tokens would be of older weights than those before; waves may do that."""
        context, obeying = router.core.context, self._world.workers[member.name].core.member
        if router_of(obeying) != context.instance:
            return  # a router that stood still, say: nobody will carry that out
        key = rid, context.intent.fleet
        before, instance = self._placed_at.get(key, (0, ""))
        if member.version >= before:
            self._placed_at[key] = member.version, context.instance
            return
        was_told = context.instance == instance or context.members.store() is not None
        if was_told and not self._world.workload.has_waves:
            text = f"goes back from version {before} to {member.version} on {member.name}"
            self.broken("never_goes_back", rid, text)

    def _owns_alone(self, worker: WorkerNode, rid: str, where: str) -> None:
        world = self._world
        for other in world.workers.values():
            member = other.core.member
            if other is worker or member.deliveries.running(rid) is None:
                continue
            if not other.is_alive or not holds_lease(member, world.time.now):
                continue
            if world.routers.is_split:
                self.seen["owners_in_a_split"] += 1  # each obeys its own router
            else:
                self.broken("one_owner", rid, f"{where}, and {other.name} still owns it")

    def _is_current(self, rid: str, entry: Entry, where: str) -> None:
        """Whether the router has given this request to somebody else meanwhile."""
        router = self._world.router
        request = router.core.table.get(rid)
        if (
            request is None
            or self._world.routers.is_split
            or request.state not in {"sent", "running"}
        ):
            return
        if request.attempt > entry.attempt:
            self.broken("current_attempt", rid, f"{where} begins after {request.attempt}")

    def _fits(self, worker: WorkerNode, entry: Entry, where: str) -> None:
        """Whether the engine has the weights that its worker attests and the request asks for."""
        version = worker.host.version if worker.host is not None else 0
        if version_of(worker.core) != version and not is_updating(worker.core):
            text = f"{where} attests {version_of(worker.core)} and serves {version}"
            self.broken("true_version", entry.rid, text)
        rule = parse_versions(entry.place.versions) if entry.place is not None else None
        if isinstance(rule, VersionRule) and not rule.accepts(version, version):
            self.broken("true_version", entry.rid, f"{where} gets {version} instead of {rule}")

    def _in_time(self, worker: WorkerNode, rid: str, where: str) -> None:
        case, health = self._world.case(rid), self._world.health
        if case is None:
            return
        is_held_up = health.is_disturbed or health.is_touched(worker.name, few_lost=1)
        faulty_s = FAULTY_SLACK_S + STRANDED_S * isinstance(self._world.routers, RouterPair)
        slack_s = faulty_s if is_held_up else CALM_SLACK_S
        late_s = self._world.time.now - case.deadline_at
        if late_s > slack_s:
            self.broken("not_expired", rid, f"{where} begins {late_s:.2f} s after its deadline")
