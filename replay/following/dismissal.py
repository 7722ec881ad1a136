"""Whether the router has sent somebody away for good; clients greet again after the other kinds.

Spec: docs/protocol.md, "Membership".
"""

from typing import cast

from bus.codec import unpack
from bus.entry import Entry
from bus.errors import PeerLost, RemoteProtocolError
from bus.messages.membership import Dismissed

COMES_BACK = frozenset({"unknown-peer", "shutting-down"})


def sent_away(entry: Entry) -> PeerLost | None:
    """The error for whoever was told this; None if there is no need for one."""
    if entry.kind != "dismissed":
        return None
    try:
        dismissed = cast("Dismissed", unpack(entry))
    except RemoteProtocolError:
        return None
    if dismissed.code in COMES_BACK:
        return None
    return PeerLost(f"the router will not have it: {dismissed.message}")
