"""A request, and an open session, as the router sees them: their records and life cycles.

A request's record exists from the first `generate` (or from a worker's claim after a restart) until
the client has acknowledged its ending, or until it is declared lost; the client holds the truth.
Sessions that nobody opened have no record; their requests just stick to a worker.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec import Raw

from rolloutbus.bus.actor.effects import next_state
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Attempt, Placement
from rolloutbus.bus.wire.versions import VersionRule

SessionState = Literal["held", "active", "resting", "gone"]

SESSION_LIFE: dict[SessionState, dict[str, SessionState]] = {
    # between two turns, within its grace: its next request goes first
    "held": {
        "opened": "held",
        "asked": "active",
        "rested": "resting",
        "closed": "gone",
        "expired": "gone",
    },
    # a request of it waits or runs
    "active": {"opened": "active", "asked": "active", "ended": "held", "closed": "gone"},
    # the grace is over: it has its place until the lease ends, and no precedence
    "resting": {"opened": "held", "asked": "active", "closed": "gone", "expired": "gone"},
    "gone": {},
}
"""state -> event -> state. `gone` leaves the table."""


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One open session; owned by `router.placement.sessions`."""

    name: str
    client: str
    policy: str
    state: SessionState = "held"
    lease_s: float = 0.0
    grace_s: float = 0.0
    worker: str = ""
    has_lost_worker: bool = False
    """That worker is gone and nobody could take the session yet."""
    turn: str = ""
    """rid of its request that goes first, if there is one."""
    idle_since: float | None = None
    """When grace and lease began; None until the first tick after an ending."""
    waits_since: float | None = None
    """When its turn found that its worker cannot take it for now."""
    _open: set[str] = field(default_factory=set[str])
    """rids of its requests that wait or run."""

    def advance(self, event: str) -> None:
        """Take a step of SESSION_LIFE; LocalProtocolError if the event has no meaning now."""
        self.state = next_state(SESSION_LIFE, self.state, event, f"session {self.name}")

    def begin(self, rid: str) -> None:
        """A request of it came; the first one within the grace is its turn."""
        if self.state == "held":
            self.turn = rid
        self._open.add(rid)
        self.advance("asked")

    def ended(self, rid: str) -> None:
        """A request of it has ended, or was never let in."""
        self._open.discard(rid)
        if self.turn == rid:
            self.turn = ""
            self.waits_since = None
        if self.state == "active" and not self._open:
            self.idle_since = None  # an ending does not know the time; the next tick does
            self.advance("ended")


RequestState = Literal["parked", "queued", "sent", "running", "ended", "gone"]

REQUEST_LIFE: dict[RequestState, dict[str, RequestState]] = {
    # a re-sent request that a worker may claim while the router recovers
    "parked": {
        "recovered": "queued",
        "adopted": "running",
        "expired": "gone",
        "acked": "gone",
    },
    # waits for a worker with the right weights and a free slot
    "queued": {
        "dispatched": "sent",
        "adopted": "running",
        "displaced": "gone",
        "aborted": "gone",
        "expired": "gone",
        "acked": "gone",
    },
    # sent to a worker, not yet confirmed: the router still holds the body
    "sent": {
        "accepted": "running",
        "adopted": "running",
        "ended": "ended",
        "lost": "queued",
        "poisoned": "gone",
    },
    # executing; only the client could send it again, unless it is detached
    "running": {
        "accepted": "running",
        "adopted": "running",
        "ended": "ended",
        "lost": "gone",
        "requeued": "queued",
        "poisoned": "gone",
    },
    # its ending was forwarded; the worker keeps it until the client's ack passes
    "ended": {"ended": "ended", "acked": "gone", "lost": "gone"},
    "gone": {},
}
"""state -> event -> state. `gone` leaves the table."""


class WaitingLine(Protocol):
    """The lane that a request waits in, as its record knows it: `lane.Lane`."""

    def discount(self, request: "Request") -> None:
        """The request leaves the lane without being served."""

    def served(self, request: "Request", now: float) -> None:
        """The request leaves the lane for a worker."""

    def least_run_s(self, request: "Request") -> float:
        """Seconds that the request will run at least."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One `generate` on its way."""

    rid: str
    client: str
    principal: str
    """Whose share of the workers it takes; see `router.members.clients.ClientRecord`."""
    place: Placement
    state: RequestState
    rule: VersionRule | None
    """What `place.versions` means; None for `any`."""
    body: Raw
    deadline_at: float = 0.0
    order: int = 0
    """Arrival number: first come, first served within a priority."""
    attempt: Attempt = NO_ATTEMPT
    worker: str = ""
    resend_at: float = 0.0
    sent_at: float = 0.0
    """When its worker got it; 0 if that was before this router's time."""
    n_sent: int = 0
    is_waiting: bool = False
    """It is in the waiting room; parked ones are, too."""
    lane: WaitingLine | None = None
    """Where it waits for its turn, if it does."""
    is_aborted: bool = False
    is_suspect: bool = False
    """Engines died under it: it runs alone, and its body is kept as evidence."""
    may_run_elsewhere: bool = False
    """A worker that this router does not hear may be at it: nobody can be told that nothing was
    started."""
    is_reported: bool = False
    """The client has been sent `queued`."""
    session: SessionRecord | None = None

    def __lt__(self, other: "Request") -> bool:
        """Of two with the same order: those that were found at their workers never arrived."""
        return self.rid < other.rid

    @property
    def home(self) -> str:
        """The worker that it waits for, before all others: it is a session's turn. Else empty."""
        session = self.session
        return session.worker if session is not None and session.turn == self.rid else ""

    def ends_at_least(self, now: float) -> float:
        """When it would end if it were started now and ran as fast as the fastest of its kind."""
        return now if self.lane is None else now + self.lane.least_run_s(self)

    def advance(self, event: str) -> None:
        """Take a step of REQUEST_LIFE; LocalProtocolError if the event has no meaning now."""
        # Several times for each request: the table is looked up here, and `next_state` raises.
        self.state = REQUEST_LIFE[self.state].get(event) or next_state(
            REQUEST_LIFE, self.state, event, f"request {self.rid}"
        )
