"""Tensors of a weight version: their types, layout, limits, digests and checksums.

Spec: docs/protocol.md, "Weights", "Bucket".
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


_COLUMNS = 1 << 10
_DEVICE_COLUMNS = 1 << 12
_BLOCK_WORDS = 1 << 17
"""Looked at at once on a CPU: they are read twice, the second time out of its cache."""
_WORD_BYTES = 8
_MODULUS = 1 << 64


Array = Any
"""Numpy's or torch's: what both can do is all that is needed here."""
Torch = Any
"""The module: the bus does not depend on it."""
Term = tuple[int, Array]
"""A factor, and a number that it counts so many times."""


def checksum(content: Bytes) -> int:
    """Checksum of uint8 [n] that begin at a multiple of 8; a GPU can compute it, unlike a digest.

    Every single flipped bit changes it, because each word counts an odd number of times; but the
    highest bits of two words, if both are flipped, leave it as it was. It is no protection against
    somebody who means to deceive.
    """
    odd = np.arange(1, 2 * _COLUMNS, 2, dtype=np.uint64)
    return checksums_by([content], odd, block_words=_BLOCK_WORDS)[0]


def checksums_on_device(torch: Torch, contents: Sequence[Array]) -> list[int]:
    """Checksums of torch's uint8 [n] each, all on one device, computed there."""
    if not contents:
        return []
    odd = torch.arange(1, 2 * _DEVICE_COLUMNS, 2, device=contents[0].device)
    return checksums_by(contents, odd, to_ints=lambda sums: torch.stack(sums).tolist())


def checksums_by(
    contents: Iterable[Array],
    odd: Array,
    *,
    block_words: int = sys.maxsize,
    to_ints: Callable[[list[Array]], Iterable[int]] = list,
) -> list[int]:
    """Checksums of uint8 [n] each on any device, with the arithmetic of `odd`: 1, 3, 5, ….

    A word's factor is that of its row and that of its column, so that sums of rows and of columns
    are all that has to be made of the words: two readings, and hardly any memory.

    Args:
        contents: on the device of `odd`; each begins at a multiple of 8.
        odd: 64-bit ints, at least two; rows are as long.
        block_words: looked at at once.
        to_ints: brings numbers from the device, all of them at once: each wait for it may cost
            milliseconds beside other threads, which hold the interpreter.
    """
    totals: list[int] = []
    terms: list[tuple[int, Term]] = []
    for place, content in enumerate(contents):
        n_words: int = len(content) // _WORD_BYTES
        tail = content[n_words * _WORD_BYTES :]
        last = int.from_bytes(bytes(tail.tolist()), "little") if len(tail) else 0
        totals.append((2 * n_words + 1) * last)
        # Torch cannot view nothing as words.
        words = content[: n_words * _WORD_BYTES].view(odd.dtype) if n_words else ()
        for first in range(0, n_words, block_words):
            block = words[first : first + block_words]
            terms += [(place, each) for each in _terms(block, odd, first)]
    numbers = to_ints([number for _, (_, number) in terms]) if terms else ()
    for (place, (factor, _)), number in zip(terms, numbers, strict=True):
        totals[place] += factor * int(number)
    return [total % _MODULUS for total in totals]


def _terms(words: Array, odd: Array, first: int = 0) -> Iterator[Term]:
    """What has to be added up for `words`, the first of which has this number in its content."""
    n_rows, n_left = divmod(len(words), len(odd))
    if n_left:
        left = words[n_rows * len(odd) :]
        yield 1, (left * odd[:n_left]).sum()
        yield 2 * (first + n_rows * len(odd)), left.sum()
    if n_rows:
        table = words[: n_rows * len(odd)].reshape(n_rows, len(odd))
        yield 1, (table.sum(0) * odd).sum()
        rows = table.sum(1)
        yield 2 * first - len(odd), rows.sum()
        yield from ((len(odd) * factor, number) for factor, number in _terms(rows, odd))
