"""Messages about the delivery of commands: their holders and their endings.

Spec: docs/protocol.md, "Delivery", "Errors".
"""

from typing import Literal

import msgspec

from rolloutbus.bus.wire.limits import (
    MAX_FIELD_CHARS,
    MAX_SENTENCE_CHARS,
    AttemptList,
    Field,
    Natural,
    Rids,
    Sentence,
    Short,
)


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


Outcome = Literal["not_started", "unknown", "failed"]


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `failed`, `expired` and `refused`; a caller branches on `outcome` and `code`."""

    code: Short
    """From the closed list in docs/protocol.md."""
    message: Sentence
    """One sentence for a person, saying what to do."""
    outcome: Outcome
    field: Field = ""
    """The offending field, dotted, e.g. `sampling.top_p`."""
    retry_after_ms: Natural = 0

    def __post_init__(self) -> None:
        # What we say ourselves may quote an engine at length; a receiver would refuse it whole.
        if len(self.message) > MAX_SENTENCE_CHARS or len(self.field) > MAX_FIELD_CHARS:
            msgspec.structs.force_setattr(self, "message", self.message[:MAX_SENTENCE_CHARS])
            msgspec.structs.force_setattr(self, "field", self.field[:MAX_FIELD_CHARS])


def bad_request(field: str, message: str) -> Problem:
    """A value breaks a limit; nothing was started."""
    return Problem("bad_request", message, "not_started", field=field)


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `finished` for a command without a result of its own."""

    note: Sentence = ""
