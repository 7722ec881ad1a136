"""Telling the store of tensors as they are written, so that it reads them while others are."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from rolloutbus.bus.weights.manifest import Sums
from rolloutbus.bus.wire.errors import BusError, RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import Tensor, TensorDigests

PART_BYTES = 256 << 20
"""Told of at once, at least: the store reads less in the time that asking for it takes."""
PARTS = 16
"""Of a version, at most: the store is told of what is left at the end, or reads it at the seal."""

Verify = Callable[[list[int], list[int]], Awaitable[object]]
"""(places in the layout, digests) -> the store's answer, which nobody needs."""
Digest = Callable[[list[int]], Awaitable[TensorDigests]]
"""Places in the layout -> what the store reads there."""

Written = TypeVar("Written")


class EarlyVerification:
    """Of one version; made in the event loop that tells the store.

    The store verifies what has a digest, and digests what has none, which is for the caller to
    compare.
    """

    def __init__(self, layout: list[Tensor], verify: Verify, digest: Digest) -> None:
        """Asks for nothing before enough is written."""
        self._number_of = {each.name: number for number, each in enumerate(layout)}
        part_bytes = max(PART_BYTES, sum(each.size_bytes for each in layout) // PARTS)
        self._verify = verify
        self._digest = digest
        self._loop = asyncio.get_running_loop()
        self._digested = _Part[tuple[int, int]](part_bytes)
        self._undigested = _Part[int](part_bytes)
        self._verifying: set[asyncio.Task[None]] = set()
        self._digesting: set[asyncio.Task[None]] = set()
        self._found: dict[int, Sums] = {}
        self._is_closed = False

    def written(self, tensor: Tensor, digest: int | None) -> None:
        """The tensor is in its place and has this digest, if any; may be called in any thread."""
        number = self._number_of[tensor.name]
        if digest is not None:
            part = self._digested.add((number, digest), tensor.size_bytes)
            if part:
                self._loop.call_soon_threadsafe(self._begin_verifying, part)
        else:
            numbers = self._undigested.add(number, tensor.size_bytes)
            if numbers:
                self._loop.call_soon_threadsafe(self._begin_digesting, numbers)

    async def found(self) -> dict[int, Sums]:
        """What the store found in the places without digest, all of which are written.

        One that it did not answer for is missing.
        """
        numbers = self._undigested.take()
        if numbers:
            self._begin_digesting(numbers)
        if self._digesting:
            await asyncio.wait(self._digesting)
        return self._found

    def close(self) -> None:
        """Tell of nothing any more, and wait for no answer."""
        self._is_closed = True
        for each in self._verifying | self._digesting:
            each.cancel()

    def _begin_verifying(self, part: list[tuple[int, int]]) -> None:
        numbers, digests = [number for number, _ in part], [digest for _, digest in part]
        self._begin(partial(self._verify, numbers, digests), self._verifying)

    def _begin_digesting(self, numbers: list[int]) -> None:
        self._begin(partial(self._find, numbers), self._digesting)

    def _begin(self, work: Callable[[], Awaitable[object]], tasks: set[asyncio.Task[None]]) -> None:
        if not self._is_closed:
            task = self._loop.create_task(_tried(work))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _find(self, numbers: Sequence[int]) -> None:
        read = await self._digest([*numbers])
        if not len(numbers) == len(read.digests) == len(read.checksums):
            message = f"the store said {len(read.digests)} of {len(numbers)} digests"
            raise RemoteProtocolError(message)
        sums = map(Sums, read.digests, read.checksums)
        self._found |= dict(zip(numbers, sums, strict=True))


async def _tried(work: Callable[[], Awaitable[object]]) -> None:
    """The seal does without, and tells what is wrong."""
    with contextlib.suppress(BusError):
        await work()


class _Part(Generic[Written]):
    """What the store was not told of yet; used by any thread."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._written: list[Written] = []
        self._n_bytes = 0

    def add(self, written: Written, n_bytes: int) -> list[Written]:
        """All there is, once it is as many bytes as a part has; none before."""
        with self._lock:
            self._written.append(written)
            self._n_bytes += n_bytes
            return self._taken() if self._n_bytes >= self._size_bytes else []

    def take(self) -> list[Written]:
        """All there is."""
        with self._lock:
            return self._taken()

    def _taken(self) -> list[Written]:
        taken, self._written, self._n_bytes = self._written, [], 0
        return taken
