"""Timing of leases, delivery and reconnection: one frozen struct that every actor shares.

Spec: docs/protocol.md, "Timing".
"""

import math

import msgspec

from rolloutbus.bus.backoff import RECONNECT_FIRST_S, RECONNECT_MAX_S, wait_after
from rolloutbus.bus.wire.errors import SettingsError

MIN_BEATS_PER_LEASE = 5
HOLDER_SHARE = 0.8


class LeaseSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All values in seconds. Every actor of one fleet must use the same ones."""

    heartbeat_s: float = 0.5
    """Between two heartbeats."""
    lease_s: float = 3.0
    """At the router, from receipt of a heartbeat."""
    holder_s: float = 2.4
    """At the holder, from when it sent the heartbeat: it always gives up before the router."""
    silence_s: float = 1.5
    """Without an answer to a heartbeat for this long, a fresh connection is made."""
    late_tick_s: float = 1.0
    """A tick later than this means that we were frozen: read what waits before judging silence."""
    recovery_s: float = 3.5
    """A restarted router parks re-sent requests for this long."""
    resend_first_s: float = 1.0
    """Until a command or an ending that nobody has confirmed is sent again."""
    resend_factor: float = 1.5
    """By which that wait grows each time."""
    resend_max_s: float = 5.0
    """The longest such wait."""
    reconnect_first_s: float = RECONNECT_FIRST_S
    reconnect_max_s: float = RECONNECT_MAX_S
    """Also how late a peer may notice that its router is back."""
    tombstone_s: float = 600.0
    """How long an ended or aborted execution is remembered."""

    def __post_init__(self) -> None:
        if self.lease_s < MIN_BEATS_PER_LEASE * self.heartbeat_s:
            raise SettingsError("lease_s must be at least 5 x heartbeat_s")
        if not math.isclose(self.holder_s, HOLDER_SHARE * self.lease_s, rel_tol=1e-6):
            raise SettingsError("holder_s must be 0.8 x lease_s")
        if self.recovery_s < self.lease_s + self.heartbeat_s:
            raise SettingsError("recovery_s must be at least lease_s + heartbeat_s")
        if not self.heartbeat_s < self.silence_s < self.holder_s:
            raise SettingsError("silence_s must lie between heartbeat_s and holder_s")

    def resend_after(self, n_sent: int) -> float:
        """Seconds to wait for an answer after an entry was sent `n_sent` times."""
        return wait_after(n_sent, self.resend_first_s, self.resend_max_s, self.resend_factor)
