"""A request as the router sees it: its record and its life cycle.

A record exists from the first `generate` (or from a worker's claim after a restart) until the
client has acknowledged its ending, or until it is declared lost; the client holds the truth.
"""

from typing import Literal

from msgspec import Raw

from bus.entry import NO_BODY, Placement
from bus.errors import LocalProtocolError
from bus.ids import NO_ATTEMPT, Attempt
from bus.versions import VersionRule

RequestState = Literal["parked", "queued", "sent", "running", "ended", "gone"]

REQUEST_LIFE: dict[RequestState, dict[str, RequestState]] = {
    # a re-sent request that a worker may claim while the router recovers
    "parked": {"recovered": "queued", "adopted": "running", "aborted": "gone", "expired": "gone"},
    # waits for a worker with the right weights and a free slot
    "queued": {
        "dispatched": "sent",
        "adopted": "running",
        "aborted": "gone",
        "expired": "gone",
    },
    # sent to a worker, not yet confirmed: the router still holds the body
    "sent": {"accepted": "running", "adopted": "running", "ended": "ended", "lost": "queued"},
    # executing; only the client could send it again
    "running": {
        "accepted": "running",
        "adopted": "running",
        "ended": "ended",
        "lost": "gone",
    },
    # its ending was forwarded; the worker keeps it until the client's ack passes
    "ended": {"ended": "ended", "acked": "gone", "lost": "gone"},
    "gone": {},
}
"""state -> event -> state. `gone` leaves the table."""


class Request:
    """One `generate` on its way; mutable, owned by the dispatcher."""

    __slots__ = (
        "attempt",
        "body",
        "client",
        "deadline_at",
        "is_reported",
        "n_sent",
        "order",
        "place",
        "resend_at",
        "rid",
        "rule",
        "state",
        "worker",
    )

    def __init__(self, rid: str, client: str, place: Placement, state: RequestState) -> None:
        self.rid = rid
        self.client = client
        self.place = place
        self.state: RequestState = state
        self.rule: VersionRule | None = None
        """What `place.versions` means; None for `any`."""
        self.body: Raw = NO_BODY
        self.attempt: Attempt = NO_ATTEMPT
        self.worker = ""
        self.deadline_at = 0.0
        self.resend_at = 0.0
        self.n_sent = 0
        self.order = 0
        """Arrival number: first come, first served within a priority."""
        self.is_reported = False
        """The client has been told `queued`."""

    def advance(self, event: str) -> RequestState:
        """Move along REQUEST_LIFE.

        Raises:
            LocalProtocolError: the event has no meaning in this state; nothing changed.
        """
        following = REQUEST_LIFE[self.state].get(event)
        if following is None:
            msg = f"request {self.rid}: {event!r} cannot happen while {self.state!r}"
            raise LocalProtocolError(msg)
        self.state = following
        return following
