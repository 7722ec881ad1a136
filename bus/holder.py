"""The holder's side of a lease: which router it is bound to, and until when it may act.

The lease runs from the moment a beat was SENT, so that the holder gives up before the router
does, however late the answer comes. Spec: docs/protocol.md, "Membership".
"""

from bus.ids import Epoch

REMEMBERED_BEATS = 32


def lease_number(epoch: str) -> int:
    """The n of `<boot>.<n>`: later leases of one process have higher ones; 0 if there is none."""
    number = epoch.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


class LeaseHolder:
    """Epochs, beats under way, the router obeyed."""

    def __init__(self, boot: str, holder_s: float) -> None:
        self._boot = boot
        self._holder_s = holder_s
        self._lease_no = 0
        self.epoch = Epoch(f"{boot}.0")
        """`<boot>.<n>`: name of the present lease, held or asked for."""
        self._beat_seq = 0
        self._sent_at: dict[int, float] = {}
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
        # An answer to a beat of the old epoch must not renew the new one.
        self._sent_at.clear()

    def next_beat(self, now: float) -> int:
        """Number of the beat that is being sent."""
        self._beat_seq += 1
        self._sent_at[self._beat_seq] = now
        if len(self._sent_at) > REMEMBERED_BEATS:
            del self._sent_at[next(iter(self._sent_at))]
        return self._beat_seq

    def bind(self, router_epoch: int, instance: str) -> bool:
        """Obey this router, unless a newer one is obeyed already: binding only goes upward."""
        if instance != self.instance and router_epoch <= self.router_epoch:
            return False
        self.instance = instance
        self.router_epoch = max(router_epoch, self.router_epoch)
        return True

    def renew(self, seq: int) -> bool:
        """The router answered beat `seq`; False if it belongs to no beat of this epoch."""
        sent_at = self._sent_at.get(seq)
        if sent_at is None:
            return False
        self._until = max(self._until, sent_at + self._holder_s)
        return True
