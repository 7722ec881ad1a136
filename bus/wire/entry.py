"""The entry: one message inside a batch frame, its header readable without its body.

A batch frame is a list of entries. The router reads headers only; a body passes it untouched.
Spec: docs/protocol.md, "Frames".
"""

from typing import NewType

import msgspec

from rolloutbus.bus.wire.limits import (
    AttemptId,
    HeaderText,
    Marks,
    Milliseconds,
    Natural,
    Rid,
    TraceParent,
)

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


NO_BODY = msgspec.Raw(b"\x80")


class Placement(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The router's input for choosing a worker for a `generate`."""

    policy: HeaderText
    """Name of the policy whose weights are asked for."""
    versions: HeaderText = "any"
    """`any`, `latest`, `min:V`, `exact:V`, `min-tag:T` or `max-staleness:K`, judged when it is
    dispatched."""
    session: HeaderText = ""
    """Sticky key: requests of one session go to one worker; empty for none."""
    group: HeaderText = ""
    """Affinity key of the samples of one prompt; empty for none."""
    cost: int = 0
    """Tokens that it can take, prompt + max_new_tokens: what placement balances and turns are
    charged with. The worker checks it; 0: the router counts in the body."""
    priority: int = 0
    """Higher goes first among queued requests; -100..100, within the range of the client's key."""
    resend: bool = False
    """This request may already be running somewhere: a recovering router must not place it yet."""
    crashes: Natural = 0
    """Not read: what clients say of themselves makes nobody a suspect. Its place is kept."""
    outlives_client: bool = False
    """Detached: it goes on when its client is gone, and the ending waits for that name."""
    marks: Marks = b""
    """Of the prompt, see `bus.prefix_marks`: uint64 [k] little endian, the shortest first."""
    worker: HeaderText = ""
    """The only worker that may serve it; empty: any. Not beside a session."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One message: a positional header and an opaque body."""

    kind: HeaderText
    """Literal name of the body's type; see `bus.wire.kinds.KINDS`."""
    rid: Rid = ""
    """The command this belongs to; empty outside of commands and their replies."""
    attempt: AttemptId = NO_ATTEMPT
    """The execution this belongs to; set by the router, echoed by the worker."""
    epoch: HeaderText = ""
    """The worker's lease that the attempt was placed under; a mismatch is fenced."""
    route: HeaderText = ""
    """To the router: the target (`fleet`, `store`, `worker:NAME`, or empty = place it).
    To a worker: the client's name. To a client: the worker's name."""
    deadline_ms: Milliseconds = 0
    """Milliseconds left when this was sent; 0 on anything but a command."""
    place: Placement | None = None
    """Only on a `generate` from a client."""
    body: msgspec.Raw = NO_BODY
    """MessagePack map; empty here and in a frame of its own when `detached`."""
    detached: bool = False
    """The body follows as the message's second frame (bodies above 16 KiB)."""


class TracedEntry(Entry, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """An entry of protocol version 2: it says to which trace the command belongs.

    A type of its own, so that every other entry stays as short as it was in version 1.
    """

    trace: TraceParent = ""
    """`traceparent` of the sender's span."""


def traced(entry: Entry, trace: str) -> TracedEntry:
    """The same entry with a trace."""
    return TracedEntry(
        entry.kind,
        entry.rid,
        entry.attempt,
        entry.epoch,
        entry.route,
        entry.deadline_ms,
        entry.place,
        entry.body,
        entry.detached,
        trace,
    )


def untraced(entry: Entry) -> Entry:
    """The same entry without its trace."""
    if not isinstance(entry, TracedEntry):
        return entry
    return Entry(
        entry.kind,
        entry.rid,
        entry.attempt,
        entry.epoch,
        entry.route,
        entry.deadline_ms,
        entry.place,
        entry.body,
        entry.detached,
    )
