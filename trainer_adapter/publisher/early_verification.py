"""Telling the store of tensors as they are written, so that it verifies them while others are."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.weights import Tensor

PART_BYTES = 256 << 20
"""Told of at once, at least: the store reads less in the time that asking for it takes."""
PARTS = 16
"""Of a version, at most: what is left of it at the end is verified when it is sealed."""

REMIND_S = 60.0
"""A store that hears nothing of a version for `StoreSettings.reservation_s` gives it up."""

Tell = Callable[[list[int], list[int]], Awaitable[object]]
"""(places in the layout, digests) -> the store's answer, which nobody needs."""


class EarlyVerification:
    """Of one version; made in the event loop that tells the store.

    It also reminds the store that more will come, as a gather or a copy may take minutes.
    """

    def __init__(self, layout: list[Tensor], tell: Tell) -> None:
        """Tells of nothing before enough is written."""
        self._number_of = {each.name: number for number, each in enumerate(layout)}
        self._part_bytes = max(PART_BYTES, sum(each.size_bytes for each in layout) // PARTS)
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._written: list[tuple[int, int]] = []
        """Places and digests of what the store was not told of."""
        self._n_bytes = 0
        self._telling: set[asyncio.Task[None]] = set()
        self._reminding = self._loop.create_task(self._remind())
        self._is_closed = False

    def written(self, tensor: Tensor, digest: int) -> None:
        """The tensor is in its place and has this digest; may be called in any thread."""
        with self._lock:
            self._written.append((self._number_of[tensor.name], digest))
            self._n_bytes += tensor.size_bytes
            if self._n_bytes < self._part_bytes:
                return
            part, self._written, self._n_bytes = self._written, [], 0
        self._loop.call_soon_threadsafe(self._begin, part)

    def close(self) -> None:
        """Tell of nothing any more, and wait for no answer."""
        self._is_closed = True
        self._reminding.cancel()
        for each in self._telling:
            each.cancel()

    def _begin(self, part: list[tuple[int, int]]) -> None:
        if self._is_closed:
            return
        telling = self._loop.create_task(self._tell_of(part))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(REMIND_S)
            await self._tell_of([])

    async def _tell_of(self, part: list[tuple[int, int]]) -> None:
        with contextlib.suppress(BusError):  # the seal does without, and tells what is wrong
            await self._tell([number for number, _ in part], [digest for _, digest in part])
