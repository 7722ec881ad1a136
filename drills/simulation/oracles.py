"""What must always be true, judged while it happens."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from bus.entry import Entry
from bus.ids import Attempt
from drills.simulation.nodes import RouterNode, WorkerNode
from drills.simulation.peeks import holds_lease
from drills.simulation.sim_client import Case
from router.members import MemberRecord

if TYPE_CHECKING:
    from drills.simulation.world import World

CALM_SLACK_S = 0.6
"""A deadline may be passed by this much on a calm network: a tick, a step, a transit."""
FAULTY_SLACK_S = 15.0
"""Deadlines on the wire are durations: what holds a command up stretches them."""
OVERTIME_S = 1.6
"""A client gives up this long after a deadline, and says so at a tick."""
THAWED_S = 0.3
"""The first tick after a router's thaw."""


class Violation(NamedTuple):
    """Something that must never be."""

    oracle: str
    rid: str
    text: str

    def __str__(self) -> str:
        return f"{self.oracle}: {self.rid} {self.text}"


class Oracles:
    """Looks on, and keeps the counts that no product code shares."""

    def __init__(self, world: "World") -> None:
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.executions: Counter[str] = Counter()
        """By rid."""
        self._world = world
        self._executed: dict[tuple[str, Attempt], str] = {}

    def broken(self, oracle: str, rid: str, text: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(oracle, rid, text))
        self._world.note(f"VIOLATION {oracle}: {rid} {text}")

    def began(self, worker: WorkerNode, entry: Entry) -> None:
        """A worker gave a `generate` to its engine."""
        world, now, rid = self._world, self._world.time.now, entry.rid
        self.executions[rid] += 1
        member, where = worker.core.member, f"attempt {entry.attempt} on {worker.name}"
        if not holds_lease(member, now):
            self.broken("lease_held", rid, f"{where} begins without a lease")
        running = member.deliveries.running(rid)
        if running is None or running.epoch != member.epoch:
            self.broken("current_epoch", rid, f"{where} was placed under another lease")
        before = self._executed.setdefault((rid, entry.attempt), where)
        if before is not where:
            self.broken("executed_once", rid, f"{where} was begun before")
        for other in world.workers.values():
            if other is worker or other.core.member.deliveries.running(rid) is None:
                continue
            if not other.is_alive or not holds_lease(other.core.member, now):
                continue
            if now < world.health.split_until:
                self.seen["owners_in_a_split"] += 1  # each obeys its own router
            else:
                self.broken("one_owner", rid, f"{where}, and {other.name} still owns it")
        self._in_time(rid, f"{where} begins", CALM_SLACK_S)
        self._is_current(rid, entry, where)

    def answered(self, worker: WorkerNode, entry: Entry) -> None:
        """A worker sends an ending, for the first time or again."""
        if not holds_lease(worker.core.member, self._world.time.now):
            self.broken("lease_held", entry.rid, f"{worker.name} answers without a lease")

    def lease_ended(self, worker: WorkerNode) -> None:
        """A worker gave its lease up: was there any reason to?"""
        self.seen["leases_lost"] += 1
        world = self._world
        if not world.health.is_touched(worker.name) and not world.health.is_touched("router"):
            self.broken("healthy_lease", worker.name, "gave up a lease that nothing disturbed")

    def expired(self, router: RouterNode, member: MemberRecord) -> None:
        """A router took a lease away: was there any reason to?"""
        self.seen["leases_expired"] += 1
        world, now = self._world, self._world.time.now
        worker = world.workers.get(member.name)
        if worker is None or not worker.is_alive or router is not world.router:
            return
        if worker.core.member.epoch == member.epoch and holds_lease(worker.core.member, now):
            self.broken("holder_first", member.name, "still acts under a lease taken from it")
        is_thaw = 0 <= now - world.health.router_thaws_at < THAWED_S
        if not world.health.is_touched(member.name) and (
            is_thaw or not world.health.is_touched("router")
        ):
            self.broken("healthy_lease", member.name, "was expired although it is healthy")

    def took_dead(self, entry: Entry) -> None:
        """A client took the ending of an execution that it knew to be lost."""
        self.broken("stale_attempt", entry.rid, f"the ending of lost {entry.attempt} was taken")

    def completed(self, case: Case, rid: str) -> None:
        """A caller was given an outcome."""
        now = self._world.time.now
        if len(case.outcomes) > 1:
            self.broken("one_outcome", rid, f"{len(case.outcomes)} outcomes")
        case.ended_at = now
        late_s = now - max(case.deadline_at, case.client.thawed_at)
        if late_s > OVERTIME_S:
            self.broken("ends_in_time", rid, f"ended {late_s:.2f} s after its deadline")
        self._in_time(rid, "is answered", OVERTIME_S)

    def _is_current(self, rid: str, entry: Entry, where: str) -> None:
        """Whether the router has given this request to somebody else meanwhile."""
        router = self._world.router
        request = router.core.table.get(rid)
        is_split = self._world.time.now < self._world.health.split_until
        if request is None or is_split or request.state not in {"sent", "running"}:
            return
        if request.attempt > entry.attempt:
            self.broken("current_attempt", rid, f"{where} begins after {request.attempt}")

    def _in_time(self, rid: str, what: str, slack_s: float) -> None:
        world = self._world
        case = world.case(rid)
        if case is None:
            return
        slack_s = FAULTY_SLACK_S if world.health.is_disturbed else slack_s
        late_s = world.time.now - case.deadline_at
        if late_s > slack_s:
            self.broken("not_expired", rid, f"{what} {late_s:.2f} s after its deadline")
