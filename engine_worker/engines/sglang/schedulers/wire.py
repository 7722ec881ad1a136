"""What a scheduler process and its engine host send each other: orders, and columns of steps.

A scheduler sends over a stream socket in the file system: the length of a message, four bytes
little endian, and the MessagePack of one of the structs below.

An order of the host travels as the name in SGLang's request for a weight by name, which reaches
every scheduler process between two steps whatever the parallelism. SGLang brings back the answer of
one scheduler for each replica; ours come over the socket, one of every scheduler. So nothing is
pickled but text, and nothing of SGLang's waits.
"""

import struct
from typing import Annotated

import msgspec

from rolloutbus.bus.wire.messages.generation import Array
from rolloutbus.engine_worker.engine import InFlight
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Lack

PREFIX = "rolloutbus:"


class SchedulerRank(msgspec.Struct, array_like=True, frozen=True, order=True):
    """Which scheduler of its engine a process is, from 0, by SGLang's numbers."""

    dp: int
    """Replica: a whole model that has requests of its own."""
    pp: int
    """Stage: these layers of the model."""
    tp: int
    """Part of the tensors of these layers."""

    @property
    def is_first(self) -> bool:
        """Whether it is the first one of its replica."""
        return self.pp == self.tp == 0


class CheckpointTensor(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of the checkpoint, by the names and types of the safetensors format."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Placed(msgspec.Struct, array_like=True, frozen=True):
    """Where the bytes of a tensor lie."""

    tensor: CheckpointTensor
    file: int
    """Index into the files of the order."""
    offset: int


class Lent(msgspec.Struct, array_like=True, frozen=True):
    """Where on a GPU the bytes of a tensor lie, in memory of another process."""

    tensor: CheckpointTensor
    handle: bytes
    """For `CudaMemory.open`; several tensors may be behind one."""
    size_bytes: int
    """Of all that is behind the handle."""
    offset: int


class TensorRows(msgspec.Struct, array_like=True, frozen=True):
    """Whole rows of a tensor, and where they are to be written."""

    name: str
    first: int
    n: int
    offset: int


class FindTensors(msgspec.Struct, frozen=True, tag="survey"):
    """Find out where the model keeps these tensors; answered with `dtypes`."""

    tensors: list[CheckpointTensor]


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Ask the scheduler to load a version in the background; it tells `VersionStaged`."""

    version: int
    files: list[str]
    tensors: list[Placed]
    lent: list[Lent] = []


class Unstage(msgspec.Struct, frozen=True, tag="unstage"):
    """Let go of a version; an `Install` of it that has not begun is called off."""

    version: int


class GiveBackSpares(msgspec.Struct, frozen=True, tag="spares"):
    """Give back memory of the GPU that is kept for the next version."""


class Install(msgspec.Struct, frozen=True, tag="install"):
    """Asks the scheduler to activate a staged version; it always answers with one `Swapped`."""

    version: int
    in_flight: InFlight


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Write rows of active tensors into a file; answered with the active version."""

    file: str
    rows: list[TensorRows]


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Take no step before the next version: schedulers of this engine have different weights."""


Order = FindTensors | Stage | Unstage | GiveBackSpares | Install | Read | Halt


class SchedulerAnswer(msgspec.Struct, array_like=True, frozen=True):
    """To any order."""

    problem: str = ""
    """Why nothing was done."""
    is_busy: bool = False
    """The problem is one of the engine's present state."""
    version: int = 0
    """Of the active weights."""
    dtypes: list[str] = []
    """Of each tensor, as the model keeps it; empty: it has no use for it."""
    unreadable: list[str] = []
    """Names of tensors of which the model keeps something else than a copy."""
    unfilled: list[str] = []
    """The model's parameters that nothing in the checkpoint fills."""


_decode_order = msgspec.json.Decoder(Order).decode


def as_name(number: int, order: Order) -> str:
    """The name of the weight that stands for this order."""
    return f"{PREFIX}{number}:{msgspec.json.encode(order).decode()}"


def order_of(name: str) -> tuple[int, Order] | None:
    """The number and the order that a name stands for; None if it is that of a weight."""
    if not name.startswith(PREFIX):
        return None
    number, _, order = name[len(PREFIX) :].partition(":")
    return int(number), _decode_order(order)


HEADER = struct.Struct("<I")
PATH_VARIABLE = "ROLLOUTBUS_SCHEDULER_TAP"
"""Environment variable that names the socket to a scheduler."""
COARSE_VARIABLE = "ROLLOUTBUS_COARSE_TOKENS"
PREFIX_VARIABLE = "ROLLOUTBUS_PREFIX_EVENTS"
"""Set: KV events are read, and have to be of what new requests find."""
PORTS_VARIABLE = "ROLLOUTBUS_RENDEZVOUS_PORTS"
"""Set for several replicas: the port at which the schedulers of each one meet."""
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


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """This scheduler is built."""

    rank: SchedulerRank
    max_total_num_tokens: int
    """Tokens that its KV cache has room for."""
    max_req_input_len: int
    """The longest input that it takes."""
    no_texts: str = ""
    """Why it cannot make text of tokens; empty: it can."""


class Pulse(msgspec.Struct, array_like=True, frozen=True, tag="pulse"):
    """Counters of a scheduler that works."""

    n_forwards: int
    n_running: int
    n_waiting: int
    n_kv_tokens: int


class VersionsChecked(msgspec.Struct, array_like=True, frozen=True, tag="versions_checked"):
    """Counts ended requests whose versions were compared with SGLang's own record."""

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


class Answered(msgspec.Struct, array_like=True, frozen=True, tag="answered"):
    """What this scheduler says to an order."""

    order: int
    """Its number."""
    answer: SchedulerAnswer


class VersionStaged(msgspec.Struct, array_like=True, frozen=True, tag="staged"):
    """This process has the bytes of a version at hand."""

    version: int
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
    Rows
    | Looked
    | Ready
    | Pulse
    | LastWords
    | Answered
    | VersionStaged
    | Swapped
    | CacheFlushed
    | VersionsChecked
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def framed(message: Message) -> bytes:
    """Encode a message for the socket."""
    body = encode(message)
    return HEADER.pack(len(body)) + body
