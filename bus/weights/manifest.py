"""Tensors of a weight version: their types, layout, limits, digests and checksums.

Spec: docs/protocol.md, "Weights", "Bucket".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rolloutbus.bus.wire.limits import MAX_DIMENSIONS, MAX_TENSOR_NAME_BYTES, MAX_TENSORS
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Tensor, TensorForm


class FloatBits(NamedTuple):
    """How to recognise infinity and NaN in a floating-point type."""

    size_bytes: int
    """Of one number; a complex one is two."""
    not_finite: int
    """Bits that are all set in infinity and NaN, and in nothing else."""


class Dtype(NamedTuple):
    """One type."""

    size_bytes: int
    """Of one element."""
    numpy: str = ""
    """numpy's name; empty: it has none."""
    torch: str = ""
    """PyTorch's name; empty: tensors of this type are neither published nor taken from there."""
    floats: FloatBits | None = None
    """None: its values are always finite."""


DTYPES: Mapping[str, Dtype] = {
    "BOOL": Dtype(1, "bool", "bool"),
    "U8": Dtype(1, "uint8", "uint8"),
    "I8": Dtype(1, "int8", "int8"),
    "F8_E4M3": Dtype(1, "", "float8_e4m3fn", FloatBits(1, 0x7F)),
    "F8_E5M2": Dtype(1, "", "float8_e5m2", FloatBits(1, 0x7C)),
    "I16": Dtype(2, "int16", "int16"),
    "U16": Dtype(2, "uint16"),
    "F16": Dtype(2, "float16", "float16", FloatBits(2, 0x7C00)),
    "BF16": Dtype(2, "", "bfloat16", FloatBits(2, 0x7F80)),
    "I32": Dtype(4, "int32", "int32"),
    "U32": Dtype(4, "uint32"),
    "F32": Dtype(4, "float32", "float32", FloatBits(4, 0x7F80_0000)),
    "I64": Dtype(8, "int64", "int64"),
    "U64": Dtype(8, "uint64"),
    "F64": Dtype(8, "float64", "float64", FloatBits(8, 0x7FF0_0000_0000_0000)),
    "C64": Dtype(8, "complex64", "complex64", FloatBits(4, 0x7F80_0000)),
}
"""All that may be published."""

CASTABLE = ("F64", "F32", "F16", "BF16")
"""Types that a publisher casts to one another."""


ALIGN_BYTES = 64
"""Tensors begin at multiples of this: a cache line, and enough for every vector load."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def bytes_in(form: TensorForm) -> int:
    """Size of such a tensor."""
    return prod(form.shape) * DTYPES[form.dtype].size_bytes


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


def bytes_of(content: Bytes, tensor: Tensor) -> Bytes:
    """View of one tensor's bytes, uint8 [tensor.size_bytes]."""
    return content[tensor.offset : tensor.offset + tensor.size_bytes]


CHUNK_WORDS = 1 << 15
"""So many at once on a CPU: what is made of them stays in its cache."""
_WORD_BYTES = 8
_MODULUS = 1 << 64


Array = Any
"""One-dimensional, numpy's or torch's: what both can do is all that is needed here."""


def checksum(content: Bytes) -> int:
    """Checksum of uint8 [n] that begin at a multiple of 8; a GPU can compute it, unlike a digest.

    Every single flipped bit changes it, because each word counts an odd number of times. It is no
    protection against somebody who means to deceive.
    """
    return checksum_by(content, np.arange(1, 2 * CHUNK_WORDS, 2, dtype=np.uint64))


def checksum_by(
    content: Array, odd: Array, to_ints: Callable[[list[Array]], Iterable[int]] = list
) -> int:
    """Checksum of uint8 [n] on any device, with the arithmetic of `odd`: 1, 3, 5, … as 64-bit ints.

    `odd` has as many numbers as words are looked at in one go; no more memory is needed than for
    twice as many. Both are on one device. `to_ints` brings numbers from there, all at once: each
    wait for it may cost milliseconds beside other threads, which hold the interpreter.
    """
    n_words: int = len(content) // _WORD_BYTES
    tail = int.from_bytes(bytes(content[n_words * _WORD_BYTES :].tolist()), "little")
    total = tail * (2 * n_words + 1)
    if n_words == 0:
        return total  # torch cannot view nothing as words
    words = content[: n_words * _WORD_BYTES].view(odd.dtype)
    starts = range(0, n_words, len(odd))
    chunks = [words[start : start + len(odd)] for start in starts]
    sums = [each for chunk in chunks for each in (chunk.sum(), (chunk * odd[: len(chunk)]).sum())]
    numbers = iter(to_ints(sums))
    for start, plain, weighted in zip(starts, numbers, numbers, strict=True):
        total += int(weighted) + 2 * start * int(plain)
    return total % _MODULUS
