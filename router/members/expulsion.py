"""Connections that the router ends: their keys lost rights, or they break the protocol for ever.

Spec: docs/protocol.md, "Limits".
"""

from collections.abc import Callable

from rolloutbus.bus.wire.ids import Peer
from rolloutbus.router.context import Context
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.membership import Membership
from rolloutbus.router.members.offences import Offences


class Expulsion:
    """Dismisses connections with all that they have."""

    def __init__(
        self, context: Context, membership: Membership, leave: Callable[[ClientRecord], None]
    ) -> None:
        """`leave` ends what a client has here."""
        self._context = context
        self._membership = membership
        self._leave = leave
        self.offences = Offences()

    def expel(self, peer: Peer, code: str, why: str, now: float) -> None:
        """End a connection, and what it held here."""
        member = self._context.members.at(peer)
        client = self._context.clients.at(peer)
        self._membership.dismiss(peer, code, why)
        if client is not None:
            self._leave(client)
        elif member is not None:
            self._membership.expel(member, why, now)

    def offended(self, peer: Peer, now: float) -> bool:
        """It sent something malformed; who does so again and again is expelled. True if it was."""
        self._context.count("malformed")
        if not self.offences.add(peer, now):
            return False
        self._context.count("offenders_dismissed")
        self.expel(peer, "protocol", "too many malformed messages; see the protocol", now)
        return True
