"""Sessions that have a place: opened, renewed, moved, closed.

Spec: docs/protocol.md, "Sessions".
"""

import msgspec

from rolloutbus.bus.wire.limits import HeaderText, Short

DEFAULT_LEASE_S = 60.0
DEFAULT_GRACE_S = 30.0


class OpenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a session a place at a worker, or renew it."""

    session: HeaderText
    policy: HeaderText = "default"
    lease_s: float = DEFAULT_LEASE_S
    """The place is kept this long without a request of the session under way."""
    grace_s: float = DEFAULT_GRACE_S
    """After a request of the session, its next one goes first for this long."""
    worker: HeaderText = ""
    """Where it had its place, as far as its client knows; of a new one, whose cache to share."""


class OpenedSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `open_session`."""

    worker: Short


class CloseSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a session's place up."""

    session: HeaderText


class SessionMoved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to the session's client: its place is at another worker, without its prefix."""

    session: Short
    from_worker: Short = msgspec.field(name="from")
    to_worker: Short = msgspec.field(name="to")
    reason: Short
    """`lost`, `version`, `full`, `isolating`, or the state of the worker that it left."""
