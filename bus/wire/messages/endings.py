"""How a command ends without `finished`: one error shape for all.

Spec: docs/protocol.md, "Errors".
"""

from typing import Literal

import msgspec

from rolloutbus.bus.wire.limits import (
    MAX_FIELD_CHARS,
    MAX_SENTENCE_CHARS,
    Field,
    Natural,
    Sentence,
    Short,
)

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
    """Body of `finished` of a command that has nothing more to say."""

    note: Sentence = ""
