"""What the engine host asks of the scheduler processes about weights, and what they answer.

An order travels as the name in SGLang's request for a weight by name, which reaches every
scheduler process between two steps whatever the parallelism; the bytes of the answer come back as
the numbers of that weight. So nothing is pickled but text, and nothing of SGLang's has to wait.
"""

from collections.abc import Sequence

import msgspec

from rolloutbus.engine_worker.engine import InFlight

PREFIX = "rolloutbus:"


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
    """Open the bytes of a version in the background; `Staged` is told once they are at hand."""

    version: int
    files: list[str]
    tensors: list[Placed]
    lent: list[Lent] = []


class Unstage(msgspec.Struct, frozen=True, tag="unstage"):
    """Let go of a version; an `Install` of it that has not begun is called off."""

    version: int


class Install(msgspec.Struct, frozen=True, tag="install"):
    """Make a staged version the active one; `Swapped` is told at the end."""

    version: int
    in_flight: InFlight


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Write rows of active tensors into a file; answered with the active version."""

    file: str
    rows: list[TensorRows]


Order = FindTensors | Stage | Unstage | Install | Read


class SchedulerAnswer(msgspec.Struct, frozen=True):
    """To any order."""

    problem: str = ""
    """Why nothing was done."""
    is_busy: bool = False
    """The problem is one of the engine's present state."""
    version: int = 0
    dtypes: list[str] = []
    """Of each tensor, as the model keeps it; empty: it has no use for it."""
    unreadable: list[str] = []
    """Names of tensors of which the model keeps something else than a copy."""
    unfilled: list[str] = []
    """The model's parameters that nothing in the checkpoint fills."""


_decode_order = msgspec.json.Decoder(Order).decode
_decode_answer = msgspec.json.Decoder(SchedulerAnswer).decode


def as_name(order: Order) -> str:
    """The name of the weight that stands for this order."""
    return PREFIX + msgspec.json.encode(order).decode()


def order_of(name: str) -> Order | None:
    """What a name stands for; None if it is that of a weight."""
    return _decode_order(name[len(PREFIX) :]) if name.startswith(PREFIX) else None


def as_numbers(answer: SchedulerAnswer) -> list[float]:
    """An answer as the numbers of a weight."""
    return [float(byte) for byte in msgspec.json.encode(answer)]


def answer_of(numbers: Sequence[float]) -> SchedulerAnswer:
    """The answer that these numbers stand for."""
    return _decode_answer(bytes(int(number) for number in numbers))
