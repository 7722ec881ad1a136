"""The history of a run: what clients saw, line by line, in files that outlive them.

Times are BOOTTIME seconds, the same in every process of a machine.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

Outcome = Literal["ok", "cancelled", "expired", "refused", "lost", "failed"]


class Invoked(msgspec.Struct, frozen=True, tag="invoked"):
    """A client asked."""

    op: str
    """`CLIENT:LANE:NUMBER`: the history's own name of the request."""
    at: float
    prompt: bytes
    """int32 [n_prompt_tokens], little endian."""
    seed: int
    n_tokens: int
    """It ends after so many, and not before."""
    allowed: list[Outcome]
    """How it may end besides `ok`."""
    is_streamed: bool = False


class Progressed(msgspec.Struct, frozen=True, tag="progressed"):
    """Tokens came to a stream's reader."""

    op: str
    at: float
    worker: str
    n_tokens: int
    """Held from now on."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The caller got an answer."""

    op: str
    at: float
    outcome: Outcome
    rid: str = ""
    code: str = ""
    tokens: bytes = b""
    """int32 [n]: the result's tokens."""
    versions: list[tuple[int, int]] = []
    """[(version, n_tokens)]."""
    worker: str = ""
    n_attempts: int = 0
    streamed: bytes | None = None
    """int32 [n]: what its deltas amounted to; None if it was not streamed or did not finish."""
    n_gaps: int = 0
    """Deltas that left tokens out."""


Record = Invoked | Progressed | Ended


class HistoryWriter:
    """Appends records to a file; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 18)
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, record: Record) -> None:
        """Write one line, some time."""
        self._file.write(self._encoder.encode(record) + b"\n")


def read_history(paths: Iterable[Path]) -> Iterator[Record]:
    """All records of some files; the last line of a killed writer may be missing."""
    decoder = msgspec.json.Decoder(Invoked | Progressed | Ended)
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield decoder.decode(line)
