"""One thing that was looked at."""

from typing import Literal

import msgspec

State = Literal["ok", "note", "missing", "failed"]


class Finding(msgspec.Struct, frozen=True):
    """What was found; one line for people."""

    section: str
    name: str
    state: State
    """`note`: works, with something to know; `missing`: is not there, which may be as intended;
    `failed`: is there and does not work."""
    says: str
