"""What must always be true of leases, routers and weights, judged while it happens."""

from typing import TYPE_CHECKING

from rolloutbus.router.members.records import MemberRecord
from tests.drills.simulation.oracles import Oracles
from tests.drills.simulation.peeks import holds_lease, router_of, version_of
from tests.drills.simulation.routers import Routers
from tests.drills.simulation.sim_router import RouterNode
from tests.drills.simulation.sim_worker import WorkerNode
from tests.drills.simulation.watch import UpdatePhase

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

THAWED_S = 0.3
"""The first tick after a router's thaw."""


class FleetOracles:
    """Looks after those who serve; `oracles` keeps what it finds."""

    def __init__(self, world: "World", oracles: Oracles) -> None:
        self._world, self._oracles = world, oracles
        self.recorded_at: float | None = None
        """When the store wrote the commit down."""
        self.retired_at: float | None = None
        """When the first store did: a fleet that comes later begins anew."""
        self.behind_s = 0.0
        """For how long the fleet has served with fewer workers, because some were behind."""

    def lease_ended(self, worker: WorkerNode) -> None:
        """A worker gave its lease up: was there any reason to?"""
        self._oracles.seen["leases_lost"] += 1
        health = self._world.health
        if not health.is_touched(worker.name) and not health.is_touched("router"):
            self._oracles.broken(
                "healthy_lease", worker.name, "gave up a lease that nothing disturbed"
            )

    def expired(self, router: RouterNode, member: MemberRecord) -> None:
        """A router took a lease away: was there any reason to?"""
        self._oracles.seen["leases_expired"] += 1
        world, now = self._world, self._world.time.now
        worker = world.workers.get(member.name)
        if worker is None or not worker.is_alive or router is not world.router:
            return
        if worker.core.member.state == "away":
            return  # it said goodbye, which has been lost
        if router_of(worker.core.member) != router.core.context.instance:
            return  # it has changed over to another router, which is gone by now
        if worker.core.member.epoch == member.epoch and holds_lease(worker.core.member, now):
            self._oracles.broken(
                "holder_first", member.name, "still acts under a lease taken from it"
            )
        is_alone = isinstance(world.routers, Routers)  # of a pair another one may serve meanwhile
        is_thaw = is_alone and 0 <= now - world.health.router_thaws_at < THAWED_S
        if not world.health.is_touched(member.name) and (
            is_thaw or not world.health.is_touched("router")
        ):
            self._oracles.broken("healthy_lease", member.name, "was expired although it is healthy")

    def stepped_down(self, router: RouterNode) -> None:
        """A router left because another one holds the fleet: was there one?"""
        self._oracles.seen["routers_stepped_down"] += 1
        routers = self._world.routers
        if isinstance(routers, Routers) and not routers.stepped_down(router):
            self._oracles.broken("one_router", "", "left for another one, and was the only one")

    def session_broken(self, text: str) -> None:
        """A session has moved, or not, and its client was told something else."""
        self._oracles.broken("session_moved", "", text)

    # -- weights ------------------------------------------------------------------------------

    def update_reached(self, phase: UpdatePhase, worker: str) -> None:
        """A weight update has come so far."""
        self._world.ambushes.spring(phase, worker)

    def swapping(self, worker: WorkerNode, version: int) -> None:
        """A worker tells its engine to serve with this version."""
        if version > self._world.record.committed.get("default", 0):
            text = f"{worker.name} takes version {version}, which nobody has decided for"
            self._oracles.broken("decided_version", "", text)

    def passed(self, seconds: float) -> None:
        """Time has passed; a version that one worker has may be published, and then others wait."""
        world = self._world
        committed = world.record.committed.get("default", 0)
        if any(version_of(worker.core) < committed for worker in world.workers.values()):
            self.behind_s += seconds

    def recorded(self, version: int) -> None:
        """The store wrote a commit down."""
        if version and self.recorded_at is None:
            self.recorded_at = self._world.time.now
            self.retired_at = self.retired_at or self.recorded_at
