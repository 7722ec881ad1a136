"""Whether the router has sent somebody away for good; clients greet again after the other kinds.

Spec: docs/protocol.md, "Membership".
"""

from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import PeerLost, RemoteProtocolError
from rolloutbus.bus.wire.messages.membership import Dismissed

COMES_BACK = frozenset({"unknown-peer", "shutting-down"})


def sent_away(entry: Entry) -> PeerLost | None:
    """The error for whoever was told this; None if there is no need for one."""
    if entry.kind != "dismissed":
        return None
    try:
        dismissed = unpack_as(Dismissed, entry)
    except RemoteProtocolError:
        return None
    if dismissed.code in COMES_BACK:
        return None
    return PeerLost(f"the router will not have it: {dismissed.message}")
