"""Who holds a command now, and when its ending may be forgotten.

These carry lists so that one entry serves a whole loop tick.
Spec: docs/protocol.md, "Delivery".
"""

import msgspec

from rolloutbus.bus.wire.limits import AttemptList, Rids, Sentence, Short


class Queued(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to client: these commands wait at the router; stop resending them."""

    rids: Rids


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker to router to client: these executions have begun."""

    items: AttemptList


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Client to router to worker: these endings arrived and may leave the outbox."""

    items: AttemptList
    over: Rids = msgspec.field(default_factory=list[str])
    """Detached requests that have ended for their caller: nothing else of theirs counts."""


class Lost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to client: these executions are gone with their worker; resume, retry or give up."""

    items: AttemptList
    worker: Short
    reason: Sentence


class Fenced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Router to worker: these executions are not yours any more; stop and forget them."""

    items: AttemptList
    reason: Sentence
