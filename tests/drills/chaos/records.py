"""The history of a run: what clients saw, line by line, in files that outlive them.

Times are BOOTTIME seconds, the same in every process of a machine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

Outcome = Literal["ok", "cancelled", "expired", "refused", "lost", "failed"]
PublicationOutcome = Literal["committed", "refuted", "unknown"]
"""`refuted`: no worker ever serves it."""


class Invoked(msgspec.Struct, frozen=True, tag="invoked"):
    """A client asked."""

    op: str
    """`CLIENT:LIFE.LANE:NUMBER`: the history's own name of the request."""
    at: float
    prompt: bytes
    """int32 [n_prompt_tokens], little endian."""
    seed: int
    n_tokens: int
    """It ends after so many, and not before."""
    allowed: list[Outcome]
    """How it may end besides `ok`."""
    is_streamed: bool = False
    wants_latest: bool = False
    """It asked for the weights that were the newest when it was placed."""
    is_detached: bool = False
    """It goes on without its client; the next one of that name collects it."""


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
    is_collected: bool = False
    """By a later process than the one that asked."""


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """A client was told which detached requests of its name there are."""

    op: str
    """Its name."""
    at: float
    n_found: int


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """A trainer is about to publish a version: from now on it may be served."""

    version: int
    at: float


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """What the trainer was told of it; a trainer that is killed never says."""

    version: int
    at: float
    outcome: PublicationOutcome
    why: str = ""
    """In words, if it is not committed."""


Record = Invoked | Progressed | Ended | Looked
WeightRecord = Offered | Settled


RecordT = TypeVar("RecordT")


class HistoryWriter:
    """Appends records to a file; a context manager.

    Nothing waits in memory: what a killed process saw is in its file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, record: Record | WeightRecord) -> None:
        """Write one line."""
        self._file.write(self._encoder.encode(record) + b"\n")


def read_history(path: Path) -> Iterator[Record]:
    """What a process of clients saw; the last line of a killed writer may be torn."""
    return _read(path, msgspec.json.Decoder(Invoked | Progressed | Ended | Looked))


def read_publications(path: Path) -> Iterator[WeightRecord]:
    """What a trainer did; the same of its last line."""
    return _read(path, msgspec.json.Decoder(Offered | Settled))


def _read(path: Path, decoder: msgspec.json.Decoder[RecordT]) -> Iterator[RecordT]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)
