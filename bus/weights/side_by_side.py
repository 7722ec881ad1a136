"""Work on many tensors by several threads: one core reads memory slower than memory can be read."""

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rolloutbus.bus.weights.manifest import Bytes, bytes_of, digest_of
from rolloutbus.bus.wire.messages.weights import Tensor

MAX_THREADS = 8
"""More do not read faster together, and an engine beside them wants cores, too."""
WORTH_BYTES = 64 << 20
"""Fewer are read by the calling thread before others have started."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def n_threads() -> int:
    """Half of the cores that this process may use; at least 1, at most `MAX_THREADS`."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], n_bytes: int, *, n: int | None = None
) -> Generator[Result, None, None]:
    """Results of `work`, which releases the interpreter lock, in the order of the items.

    `n_bytes` are read in all, by `n` threads; None: `n_threads`. Who takes no more results leaves
    the rest undone.
    """
    n = n or n_threads()
    if n == 1 or n_bytes < WORTH_BYTES:
        yield from map(work, items)
        return
    threads = ThreadPoolExecutor(n, "rolloutbus-tensors")
    try:
        yield from threads.map(work, items)
    finally:
        threads.shutdown(cancel_futures=True)


def first_mismatch(content: Bytes, tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns the first tensor whose bytes in `content` do not match its digest."""
    digests = side_by_side(
        lambda tensor: digest_of(bytes_of(content, tensor)),
        tensors,
        sum(each.size_bytes for each in tensors),
    )
    found = zip(tensors, digests, strict=True)
    return next((tensor for tensor, digest in found if digest != tensor.digest), None)
