"""Names of things that cross the bus; creating random ones is left to the shells."""

from typing import NewType

ActorName = NewType("ActorName", str)
"""Stable name of a client, worker or store; at most 64 bytes of ASCII, chosen by its owner."""

RequestId = NewType("RequestId", str)
"""Name of one command, unique for ever, chosen by the client: `<client>/<n>`, n below 2**192."""

Epoch = NewType("Epoch", str)
"""One uninterrupted lease of one member: `<boot_id>.<lease_no>`."""

Peer = NewType("Peer", bytes)
"""Routing id of one connection: 16 random bytes, fresh for each socket, never shown to others."""

WeightVersion = NewType("WeightVersion", int)
"""uint64; 0 is the weights an engine started with; only grows."""

Attempt = tuple[int, int]
"""One placement of a request on a worker: (router epoch, n); later attempts compare greater."""

AttemptKey = tuple[RequestId, Attempt]
"""One execution of one request."""

NO_ATTEMPT: Attempt = (0, 0)
