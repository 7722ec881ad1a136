"""Reads and checks the active weights piece by piece between steps, all pieces of one version."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rolloutbus.bus.wire.errors import EngineFailed, Refused
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    CheckedWeights,
    CheckWeights,
    GetWeights,
    GotWeights,
    ListedWeights,
    Tensor,
    TensorForm,
)
from rolloutbus.engine_worker.engine import TensorRange, TensorSpec, WeightSource
from rolloutbus.engine_worker.weights.checks import TensorSum, is_zero


def in_batches(
    tensors: Sequence[TensorSpec] | Sequence[Tensor], most_bytes: int
) -> Iterator[list[TensorRange]]:
    """All of these tensors in order, at most `most_bytes` at a time.

    A large tensor comes in pieces; small ones come together, for each read waits for a step.
    """
    batch: list[TensorRange] = []
    size_bytes = 0
    for piece in pieces(tensors, most_bytes):
        if batch and size_bytes + piece.size_bytes > most_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(piece)
        size_bytes += piece.size_bytes
    if batch:
        yield batch


def pieces(tensors: Iterable[TensorSpec | Tensor], most_bytes: int) -> Iterator[TensorRange]:
    """All of these tensors in order, in ranges of at most `most_bytes`."""
    for tensor in tensors:
        for offset in range(0, tensor.size_bytes, most_bytes):
            size_bytes = min(most_bytes, tensor.size_bytes - offset)
            yield TensorRange(tensor.name, offset, size_bytes)


PIECE_BYTES = 8 * 1024 * 1024
"""Copied between two steps: about a millisecond."""
MAX_TRIES = 8
"""Versions that may become active while all tensors are read."""

Result = TypeVar("Result")


class _Changed(Exception):
    """Another version became active meanwhile."""


class ActiveWeights:
    """Answers questions about one engine's weights; its methods block, in any thread."""

    def __init__(self, engine: WeightSource, specs: Sequence[TensorSpec]) -> None:
        self._engine = engine
        self._specs = {spec.name: spec for spec in specs}

    def check(self, ask: CheckWeights) -> CheckedWeights:
        """Digests and more of the tensors that are asked for.

        Raises:
            Refused: there is no such tensor.
            EngineFailed: `busy`: versions change faster than they can be read.
        """
        specs = [self._spec(name, "names") for name in ask.names or self._specs]
        return _again(lambda: self._check(specs))

    def get(self, ask: GetWeights) -> GotWeights:
        """A range of one tensor.

        Raises:
            Refused: there is no such tensor or range, or it is too large.
        """
        spec = self._spec(ask.name, "name")
        if ask.offset + ask.size_bytes > spec.size_bytes:
            raise _refused("offset", f"tensor {ask.name!r} has {spec.size_bytes} bytes")
        if ask.size_bytes > CHUNK_BYTES:
            raise _refused("size_bytes", f"at most {CHUNK_BYTES} bytes at once")
        asked = TensorRange(ask.name, ask.offset, ask.size_bytes)
        version, [raw] = self._engine.read_ranges([asked])
        return GotWeights(version, spec.dtype, spec.shape, ask.offset, raw.tobytes())

    def list(self) -> ListedWeights:
        """What a version must hold to be taken by the engine; does not block."""
        return ListedWeights(
            [TensorForm(each.name, each.dtype, each.shape) for each in self._specs.values()]
        )

    def is_zero(self, name: str) -> bool:
        """Whether every byte of this tensor is 0 now."""
        return all(
            is_zero(piece)
            for ranges in in_batches([self._specs[name]], PIECE_BYTES)
            for piece in self._engine.read_ranges(ranges)[1]
        )

    def _check(self, specs: Sequence[TensorSpec]) -> CheckedWeights:
        sums = {spec.name: TensorSum(spec.dtype) for spec in specs}
        version, _ = self._engine.read_ranges([])
        for ranges in in_batches(specs, PIECE_BYTES):
            now, pieces = self._engine.read_ranges(ranges)
            if now != version:
                raise _Changed
            for asked, piece in zip(ranges, pieces, strict=True):
                sums[asked.name].add(piece)
        return CheckedWeights(version, [each.of(name) for name, each in sums.items()])

    def _spec(self, name: str, field: str) -> TensorSpec:
        if name not in self._specs:
            raise _refused(field, f"the engine has no tensor {name!r}")
        return self._specs[name]


def _again(call: Callable[[], Result]) -> Result:
    for _ in range(MAX_TRIES):
        try:
            return call()
        except _Changed:
            continue
    message = f"{MAX_TRIES} versions became active while the weights were read"
    raise EngineFailed(Problem("busy", message, "not_started", retry_after_ms=1000))


def _refused(field: str, message: str) -> Refused:
    return Refused(Problem("bad_request", message, "not_started", field=field))
