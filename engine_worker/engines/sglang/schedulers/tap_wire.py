"""What a scheduler process tells its engine host: the columns of its steps, and its last words.

One stream socket per scheduler, in the file system, between processes of one worker. A message is
its length, four bytes little endian, and the MessagePack of one of the structs below.
"""

import struct
from typing import Annotated

import msgspec

from rolloutbus.bus.wire.messages.array import Array
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Lack

HEADER = struct.Struct("<I")
PATH_VARIABLE = "ROLLOUTBUS_SCHEDULER_TAP"
"""Environment variable that names the socket to a scheduler."""
COARSE_VARIABLE = "ROLLOUTBUS_COARSE_TOKENS"
PREFIX_VARIABLE = "ROLLOUTBUS_PREFIX_EVENTS"
"""Set: KV events are read, and have to be of what new requests find."""
STREAMED, COARSE = "s", "c"
"""First letter of an engine's request id: publish every step, or larger portions."""
MAX_MESSAGE_BYTES = 1 << 31


class RowFinish(msgspec.Struct, array_like=True, frozen=True):
    """How a row ended, in SGLang's words."""

    row: int
    kind: str
    """`stop`, `length` or `abort`."""
    message: str = ""
    """Of an abort."""
    status: int = 0
    """HTTP status of an abort that is an error."""


class Rows(msgspec.Struct, array_like=True, frozen=True, tag="rows"):
    """New tokens of some requests, all of one weight version."""

    version: int | None
    """None: nobody has said which weights computed them."""
    rids: list[str]
    counts: list[int]
    tokens: bytes
    """int32 [sum(counts)]."""
    logprobs: bytes
    """float32 [sum(counts)]."""
    finishes: list[RowFinish]
    support_logprobs: bytes = b""
    """float32 [sum(counts)], renormalised over the support sampled from; NaN: it was truncated, and
    not measured. Empty: nothing was truncated."""
    arrays: list[tuple[int, dict[str, Array]]] = []
    """(row, what it wanted) of rows that finish."""


class Looked(msgspec.Struct, array_like=True, frozen=True, tag="looked"):
    """This scheduler is hooked; what of the rest it has not. Told before anything is built."""

    lacks: list[Lack]


class Pulse(msgspec.Struct, array_like=True, frozen=True, tag="pulse"):
    """Counters of a scheduler that works."""

    n_forwards: int
    n_running: int
    n_waiting: int
    n_kv_tokens: int


class VersionsChecked(msgspec.Struct, array_like=True, frozen=True, tag="versions_checked"):
    """Requests that ended so far and whose versions were compared with SGLang's own account."""

    n_requests: int
    n_contradicted: int
    """Of them; each has failed."""


class CacheFlushed(msgspec.Struct, array_like=True, frozen=True, tag="flushed"):
    """The prefix cache of this scheduler is empty."""

    n_tokens: int
    """That it held."""


class LastWords(msgspec.Struct, array_like=True, frozen=True, tag="last_words"):
    """Why this scheduler is about to end."""

    message: Annotated[str, msgspec.Meta(max_length=4096)]


class VersionStaged(msgspec.Struct, array_like=True, frozen=True, tag="staged"):
    """This process has the bytes of a version at hand."""

    version: int
    rank: int
    n_ranks: int
    """Processes that tell so."""
    problem: str
    """Why it has not; empty: it has."""


class Swapped(msgspec.Struct, array_like=True, frozen=True, tag="swapped"):
    """How an order to install a version ended."""

    version: int
    stall_ms: float
    """How long no steps were taken."""
    n_retracted: int = 0
    n_aborted: int = 0
    problem: str = ""
    """Why it is not the active version; empty: it is."""
    is_busy: bool = False
    """Nothing was touched, and later it may be possible."""
    is_torn: bool = False
    """The weights are of no version now."""


Message = (
    Rows | Looked | Pulse | LastWords | VersionStaged | Swapped | CacheFlushed | VersionsChecked
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def framed(message: Message) -> bytes:
    """A message as it goes over the socket."""
    body = encode(message)
    return HEADER.pack(len(body)) + body
