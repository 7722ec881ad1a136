"""What the simulated processes tell whoever looks on, at the moment when it happens."""

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.router.members.records import MemberRecord

if TYPE_CHECKING:
    from tests.drills.simulation.sim_router import RouterNode
    from tests.drills.simulation.sim_worker import WorkerNode

UpdatePhase = Literal["prepare", "transfer", "staged", "record", "recorded", "commit", "swap"]
"""Where a weight update is: the router asks a worker to prepare; the worker pulls; it holds the
new weights beside the old; the router asks the store to record; the store has; the router tells a
worker to commit; the worker swaps."""


class RequestWatch(Protocol):
    """Who looks after the requests."""

    def placed(self, router: "RouterNode", member: MemberRecord, rid: str, late_s: float) -> None:
        """A router gives a `generate` to a worker, `late_s` after the deadline it was told."""
        ...

    def began(self, worker: "WorkerNode", entry: Entry) -> None:
        """A worker gave a `generate` to its engine."""
        ...

    def overran(self, worker: "WorkerNode", rid: str, late_s: float) -> None:
        """A worker goes on with a request so long after the deadline that it was given."""
        ...

    def answered(self, worker: "WorkerNode", entry: Entry) -> None:
        """A worker sends an ending."""
        ...

    def engine_failed(self, rid: str) -> None:
        """An engine reported an error instead of this request's tokens."""
        ...

    def engine_struck(self, worker: "WorkerNode", rid: str) -> None:
        """An engine died of this request."""
        ...


class FleetWatch(Protocol):
    """Who looks after leases, routers and weights."""

    def lease_ended(self, worker: "WorkerNode") -> None:
        """A worker gave its lease up."""
        ...

    def expired(self, router: "RouterNode", member: MemberRecord) -> None:
        """A router took a lease away because it ran out."""
        ...

    def stepped_down(self, router: "RouterNode") -> None:
        """A router left because another one holds the fleet."""
        ...

    def session_broken(self, text: str) -> None:
        """Something is wrong with what a router says of its sessions."""
        ...

    def update_reached(self, phase: UpdatePhase, worker: str) -> None:
        """A weight update has come so far; `worker` is empty where it is not about one."""
        ...

    def swapping(self, worker: "WorkerNode", version: int) -> None:
        """A worker tells its engine to serve with this version."""
        ...

    def recorded(self, version: int) -> None:
        """The store wrote a commit down."""
        ...


class Watch(NamedTuple):
    """Both."""

    requests: RequestWatch
    fleet: FleetWatch
