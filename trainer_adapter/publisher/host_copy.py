"""Copying one tensor to its place in host memory, judging its bytes while they are in the cache.

Pieces are what makes it one pass through memory: each is copied (from a GPU, cast), digested and
searched for infinity, NaN and anything but zero before the next is touched.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import xxhash

from rolloutbus.bus.weights.manifest import Bytes

PIECE_BYTES = 2 << 20
"""Little enough to stay in the cache until it has been judged."""
PINNED_BYTES = 32 << 20
"""Of a GPU's tensor that are under way at once; two such buffers per thread that copies."""


class Judgement(NamedTuple):
    """What was found out about a tensor while it was copied."""

    digest: int
    """xxh3-64 of its bytes."""
    is_finite: bool
    """No element is infinite or NaN; always true of integers."""
    is_zero: bool
    """Every element is 0; never true of integers and of tensors without elements."""


def put(place: Bytes, target_dtype: torch.dtype, source: torch.Tensor) -> Judgement:
    """Copy `source` to `place`, uint8 [its bytes as `target_dtype`], cast to that type."""
    if not source.numel():
        return Judgement(xxhash.xxh3_64_intdigest(place.data), is_finite=True, is_zero=False)
    target = torch.frombuffer(place.data, dtype=target_dtype)
    hasher = xxhash.xxh3_64()
    is_float = target_dtype.is_floating_point or target_dtype.is_complex
    is_finite, is_zero = True, is_float
    start = 0
    for piece in _pieces(source, target):
        copied = target[start : start + len(piece)]
        if piece.data_ptr() != copied.data_ptr():
            copied.copy_(piece)
        hasher.update(place[start * copied.itemsize : (start + len(piece)) * copied.itemsize].data)
        if is_float:
            low, high = _range(copied)
            is_finite = is_finite and low - low == high - high == 0.0
            is_zero = is_zero and low == high == 0.0
        start += len(piece)
    return Judgement(hasher.intdigest(), is_finite, is_zero)


def _split(flat: torch.Tensor, n_elements: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(flat), n_elements):
        yield flat[start : start + n_elements]


def _pieces(source: torch.Tensor, target: torch.Tensor) -> Iterator[torch.Tensor]:
    """`source` in pieces of one dimension, on the host; those of `target` if they lie there."""
    n_elements = max(1, PIECE_BYTES // target.itemsize)
    if source.is_cuda:
        for large in _from_gpu(source, target.dtype):
            yield from _split(large, n_elements)
    elif source.is_contiguous():
        yield from _split(source.view(-1), n_elements)
    else:
        target.view(source.shape).copy_(source)
        yield from _split(target, n_elements)


def _from_gpu(source: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Pieces in pinned memory, cast; while one is read the GPU writes the next."""
    flat = source.contiguous().view(-1)
    stream = torch.cuda.Stream(source.device)
    stream.wait_stream(torch.cuda.current_stream(source.device))
    n_elements = PINNED_BYTES // dtype.itemsize
    buffers = [
        torch.empty(min(n_elements, len(flat)), dtype=dtype, pin_memory=True) for _ in range(2)
    ]
    under_way: tuple[torch.Tensor, torch.cuda.Event] | None = None
    with torch.cuda.stream(stream):
        for number, piece in enumerate(_split(flat, n_elements)):
            landed = buffers[number % 2][: len(piece)]
            landed.copy_(piece.to(dtype), non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
            if under_way is not None:
                under_way[1].synchronize()
                yield under_way[0]
            under_way = (landed, event)
    if under_way is not None:
        under_way[1].synchronize()
        yield under_way[0]


def _range(piece: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest element; NaN if there is one."""
    if piece.is_complex():
        piece = torch.view_as_real(piece)
    elif piece.itemsize == 1:
        piece = piece.float()
    low, high = torch.aminmax(piece)
    return float(low), float(high)
