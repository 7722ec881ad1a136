"""What a list of tensors must satisfy before a byte is allocated for it, and how it is laid out.

Spec: docs/protocol.md, "Weights".
"""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import xxhash

from rolloutbus.bus.weights.dtypes import DTYPES
from rolloutbus.bus.wire.limits import MAX_DIMENSIONS, MAX_TENSOR_NAME_BYTES, MAX_TENSORS
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Tensor

ALIGN_BYTES = 64
"""Tensors begin at multiples of this: a cache line, and enough for every vector load."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Tensor]:
    """Byte ranges, one after another, for tensors given as (name, dtype, shape)."""
    placed: list[Tensor] = []
    offset = 0
    for name, dtype, shape in tensors:
        size_bytes = prod(shape) * DTYPES[dtype].size_bytes
        placed.append(Tensor(name, dtype, shape, offset, size_bytes))
        offset += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return placed


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Size of the segment that holds them, in bytes."""
    return max((each.offset + each.size_bytes for each in tensors), default=0)


def check_tensors(tensors: Sequence[Tensor]) -> Problem | None:
    """Why these cannot be the tensors of a version; None if they can.

    Byte ranges must be ascending and disjoint, sizes must agree with dtype and shape, names must
    be unique.
    """
    if not 0 < len(tensors) <= MAX_TENSORS:
        return _problem("tensors", f"a version has 1 to {MAX_TENSORS} tensors, not {len(tensors)}")
    end = 0
    names: set[str] = set()
    for tensor in tensors:
        wrong = _wrong_with(tensor, end)
        if wrong is None and tensor.name in names:
            wrong = "the name appears twice"
        if wrong is not None:
            return _problem(f"tensors.{tensor.name[:MAX_TENSOR_NAME_BYTES]}", wrong)
        names.add(tensor.name)
        end = tensor.offset + tensor.size_bytes
    return None


def _wrong_with(tensor: Tensor, end_of_last: int) -> str | None:
    if not 0 < len(tensor.name.encode()) <= MAX_TENSOR_NAME_BYTES:
        return f"a name has 1 to {MAX_TENSOR_NAME_BYTES} bytes"
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"dtype {tensor.dtype[:16]!r} is not one of {', '.join(DTYPES)}"
    if len(tensor.shape) > MAX_DIMENSIONS or any(each < 0 for each in tensor.shape):
        return f"shape {tensor.shape} is not a shape"
    if tensor.size_bytes != prod(tensor.shape) * dtype.size_bytes:
        return f"{tensor.size_bytes} bytes cannot hold {tensor.dtype} {list(tensor.shape)}"
    if tensor.offset < end_of_last:
        return f"its bytes begin at {tensor.offset}, inside the tensor before it"
    return None


def _problem(field: str, message: str) -> Problem:
    return Problem(code="bad_request", message=message, outcome="not_started", field=field)


def digest_of(content: Bytes) -> int:
    """xxh3-64 of raw bytes; releases the interpreter lock."""
    return xxhash.xxh3_64_intdigest(content.data)


def first_mismatch(content: Bytes, tensors: Sequence[Tensor]) -> Tensor | None:
    """The first tensor whose bytes in `content` are not those that its digest was made of."""
    for tensor in tensors:
        if digest_of(bytes_of(content, tensor)) != tensor.digest:
            return tensor
    return None


def bytes_of(content: Bytes, tensor: Tensor) -> Bytes:
    """View of one tensor's bytes, uint8 [tensor.size_bytes]."""
    return content[tensor.offset : tensor.offset + tensor.size_bytes]
