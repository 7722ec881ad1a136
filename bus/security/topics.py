"""Which streams a principal may read, as its subscriptions ask for them.

A topic is the digest of a client's name, from which nobody can tell the name. So who reads the rows
of a client from a guarded publisher says the name, too: that is its *claim*. The publisher answers
the claim; the digest counts only for roles that may read everything.
Spec: docs/protocol.md, "Security".
"""

from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.wire.codec import topic_of
from rolloutbus.bus.wire.validation import check_name

CLAIM = b"client:"
READS_EVERYTHING = frozenset({"subscriber", "admin"})
"""Roles that watch a fleet."""


def claim_of(client: str) -> bytes:
    """What a subscriber asks a guarded publisher for, to get the rows of this client."""
    return CLAIM + client.encode()


def is_claim(asked: bytes) -> bool:
    """Whether a subscription names a client."""
    return asked.startswith(CLAIM)


def granted(principal: Principal, asked: bytes) -> bytes | None:
    """The topic, or beginning of topics, that a subscription gets; None: nothing."""
    sees_everything = principal.role in READS_EVERYTHING
    if not is_claim(asked):
        return asked if sees_everything else None
    client = asked.removeprefix(CLAIM).decode("ascii", "replace")
    if check_name(client) is None and (sees_everything or principal.may_be(client)):
        return topic_of(client)
    return None
