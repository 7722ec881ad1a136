"""Life of a member on the bus: the table of its states.

A member has a link (none, or one on which it said hello) and a lease (held or not); each state is
one combination of the two. Spec: docs/protocol.md, "Membership".
"""

from typing import Literal

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
