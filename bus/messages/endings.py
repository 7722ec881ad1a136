"""How a command ends without `finished`: one error shape for all.

Spec: docs/protocol.md, "Errors".
"""

from typing import Literal

import msgspec

Outcome = Literal["not_started", "unknown", "failed"]


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `failed`, `expired` and `refused`; a caller branches on `outcome` and `code`."""

    code: str
    """From the closed list in docs/protocol.md."""
    message: str
    """One sentence for a person, saying what to do."""
    outcome: Outcome
    field: str = ""
    """The offending field, dotted, e.g. `sampling.top_p`."""
    retry_after_ms: int = 0


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `finished` of a command that has nothing more to say."""

    note: str = ""
