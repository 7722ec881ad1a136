"""Tensors cut into ranges that are read together: the engine's steps wait for each read."""

from collections.abc import Iterable, Iterator, Sequence

from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.engine_worker.engine import TensorRange, TensorSpec


def in_batches(
    tensors: Sequence[TensorSpec] | Sequence[Tensor], most_bytes: int
) -> Iterator[list[TensorRange]]:
    """All of these tensors in order, at most `most_bytes` at a time.

    A large tensor comes in pieces; small ones come together, for each read waits for a step.
    """
    batch: list[TensorRange] = []
    size_bytes = 0
    for piece in _pieces(tensors, most_bytes):
        if batch and size_bytes + piece.size_bytes > most_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(piece)
        size_bytes += piece.size_bytes
    if batch:
        yield batch


def _pieces(tensors: Iterable[TensorSpec | Tensor], most_bytes: int) -> Iterator[TensorRange]:
    for tensor in tensors:
        for offset in range(0, tensor.size_bytes, most_bytes):
            size_bytes = min(most_bytes, tensor.size_bytes - offset)
            yield TensorRange(tensor.name, offset, size_bytes)
