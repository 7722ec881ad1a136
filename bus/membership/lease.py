"""The link and lease of a member: its states, the router it is bound to, until when it may act.

The lease runs from the moment a heartbeat was SENT, so that the holder gives up before the router
does, however late the answer comes. Spec: docs/protocol.md, "Membership", "Two routers".
"""

from typing import Literal

from rolloutbus.bus.wire.entry import Epoch

LinkState = Literal["away", "waiting", "greeting", "leased", "relinking", "regreeting", "left"]
LinkEvent = Literal[
    "online", "connected", "leased", "link_lost", "unknown", "lease_expired", "offline", "stopped"
]

MEMBER_LINK: dict[LinkState, dict[LinkEvent, LinkState]] = {
    # nothing to offer (no engine): no link, no lease
    "away": {"online": "greeting", "offline": "away", "stopped": "left"},
    # no link, no lease: the next try waits for its time
    "waiting": {"connected": "greeting", "offline": "away", "stopped": "left"},
    # hello is on its way; nothing may be executed
    "greeting": {
        "leased": "leased",
        "link_lost": "waiting",
        "unknown": "greeting",
        "offline": "away",
        "stopped": "left",
    },
    # everything may happen
    "leased": {
        "leased": "leased",
        "link_lost": "relinking",
        "unknown": "regreeting",
        "lease_expired": "waiting",
        "offline": "away",
        "stopped": "left",
    },
    # the link is gone, the lease still runs, and so does the work
    "relinking": {
        "connected": "regreeting",
        "lease_expired": "waiting",
        "offline": "away",
        "stopped": "left",
    },
    # hello with the same epoch on a fresh link, while the lease still runs
    "regreeting": {
        "leased": "leased",
        "link_lost": "relinking",
        "unknown": "regreeting",
        "lease_expired": "waiting",
        "offline": "away",
        "stopped": "left",
    },
    "left": {"stopped": "left"},
}
"""state -> event -> state."""

LINKED: frozenset[LinkState] = frozenset({"greeting", "leased", "regreeting"})
"""States in which entries can be sent and heartbeats are."""
UNLINKED_TRYING: frozenset[LinkState] = frozenset({"waiting", "relinking"})
"""States in which a fresh connection is due."""
HOLDING: frozenset[LinkState] = frozenset({"leased", "relinking", "regreeting"})
"""States in which a lease was held when it was last looked at."""


REMEMBERED_BEATS = 32


class LeaseWitness:
    """Numbers heartbeats, and remembers the latest that was answered by the router obeyed.

    A router begins after its predecessor has ended. So a peer that holds an answer to a heartbeat
    sent after another router had begun knows that there are two. Spec: docs/protocol.md, "Two
    routers".
    """

    def __init__(self) -> None:
        self._seq = 0
        self._sent_at: dict[int, float] = {}
        self._alive_at = float("-inf")

    def heartbeat(self, now: float) -> int:
        """Number of the heartbeat that is being sent."""
        self._seq += 1
        self._sent_at[self._seq] = now
        self._sent_at.pop(self._seq - REMEMBERED_BEATS, None)
        return self._seq

    def answered(self, seq: int) -> float | None:
        """The router obeyed answers heartbeat `seq`; when that was sent, None if it is forgotten.

        The time of sending counts: the answer may have lain unread for long.
        """
        sent_at = self._sent_at.get(seq)
        if sent_at is not None and sent_at > self._alive_at:
            self._alive_at = sent_at
        return sent_at

    def has_outlived(self, up_s: float, now: float) -> bool:
        """Whether our router lived after one began that has been running for `up_s` seconds."""
        return self._alive_at > now - up_s

    def silence_s(self, now: float) -> float:
        """Since our router was last known to live."""
        return now - self._alive_at

    def rebound(self) -> None:
        """Another router is obeyed from now on: nothing is known of it yet."""
        self._alive_at = float("-inf")


def lease_number(epoch: str) -> int:
    """The n of `<boot>.<n>`: later leases of one process have higher ones; 0 if there is none."""
    number = epoch.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


class LeaseHolder:
    """Epochs, heartbeats under way, the router obeyed."""

    def __init__(self, boot: str, holder_s: float) -> None:
        self._boot = boot
        self._holder_s = holder_s
        self._lease_no = 0
        self.epoch = Epoch(f"{boot}.0")
        """`<boot>.<n>`: name of the present lease, held or asked for."""
        self._lease_witness = LeaseWitness()
        self._heartbeat_seq = 0
        self._first_seq = 1
        """Answers to earlier heartbeats do not renew: those were of another epoch."""
        self._until = 0.0
        self.router_epoch = 0
        self.instance = ""
        """Random name of the router obeyed; empty before the first."""

    def is_held(self, now: float) -> bool:
        """Whether commands may be executed and endings sent."""
        return now < self._until

    def renounce(self) -> None:
        """Give the lease up; the next one has a new epoch."""
        self._lease_no += 1
        self.epoch = Epoch(f"{self._boot}.{self._lease_no}")
        self._until = 0.0
        self._first_seq = self._heartbeat_seq + 1

    def next_heartbeat(self, now: float) -> int:
        """Number of the heartbeat that is being sent."""
        self._heartbeat_seq = self._lease_witness.heartbeat(now)
        return self._heartbeat_seq

    def bind(self, router_epoch: int, instance: str) -> bool:
        """Obey this router, unless a newer one is obeyed already: binding only goes upward."""
        if instance != self.instance:
            if router_epoch <= self.router_epoch:
                return False
            self._lease_witness.rebound()
            self.instance = instance
        self.router_epoch = max(router_epoch, self.router_epoch)
        return True

    def rejects(self, router_epoch: int, instance: str, up_s: float, now: float) -> bool:
        """Whether a router that welcomes us, `up_s` after its start, is a second one."""
        if not self.instance or instance == self.instance:
            return False
        return router_epoch <= self.router_epoch or self._lease_witness.has_outlived(up_s, now)

    def released(self) -> None:
        """The router obeyed has stood down: one that began beside it may be obeyed next."""
        self._lease_witness.rebound()

    def renew(self, seq: int) -> bool:
        """The router obeyed answered heartbeat `seq`; False if that was none of this epoch."""
        sent_at = self._lease_witness.answered(seq)
        if sent_at is None or seq < self._first_seq:
            return False
        self._until = max(self._until, sent_at + self._holder_s)
        return True
