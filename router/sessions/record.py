"""A session with a place at a worker: its record and its life cycle.

Sessions that nobody opened have no record; their requests just stick to a worker.
Spec: docs/protocol.md, "Sessions".
"""

from typing import Literal

from rolloutbus.bus.actor.life import next_state

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


class SessionRecord:
    """One open session; mutable, owned by `router.sessions`."""

    __slots__ = (
        "_open",
        "client",
        "grace_s",
        "has_lost_worker",
        "idle_since",
        "lease_s",
        "name",
        "policy",
        "state",
        "turn",
        "waits_since",
        "worker",
    )

    def __init__(self, name: str, client: str, policy: str) -> None:
        self.name = name
        self.client = client
        """Who opened it."""
        self.policy = policy
        self.state: SessionState = "held"
        self.lease_s = 0.0
        self.grace_s = 0.0
        self.worker = ""
        """Where its place is."""
        self.has_lost_worker = False
        """That worker is gone and nobody could take the session yet."""
        self.turn = ""
        """rid of its request that goes first, if there is one."""
        self.idle_since: float | None = None
        """When grace and lease began; None until the first tick after an ending."""
        self.waits_since: float | None = None
        """When its turn found that its worker cannot take it for now."""
        self._open: set[str] = set()
        """rids of its requests that wait or run."""

    def advance(self, event: str) -> SessionState:
        """Move along SESSION_LIFE.

        Raises:
            LocalProtocolError: the event has no meaning in this state; nothing changed.
        """
        self.state = next_state(SESSION_LIFE, self.state, event, f"session {self.name}")
        return self.state

    def begin(self, rid: str) -> None:
        """A request of it came; the first one within the grace is its turn."""
        if self.state == "held":
            self.turn = rid
        self._open.add(rid)
        self.advance("asked")

    def ended(self, rid: str) -> None:
        """A request of it is over, or was never let in."""
        self._open.discard(rid)
        if self.turn == rid:
            self.turn = ""
            self.waits_since = None
        if self.state == "active" and not self._open:
            self.idle_since = None  # an ending does not know the time; the next tick does
            self.advance("ended")

    def leave(self, event: str) -> None:
        """It has no place any more; its requests are like any other's."""
        self.advance(event)
        self.turn = ""
