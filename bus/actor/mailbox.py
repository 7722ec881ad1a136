"""A bounded queue between its writers and the one task that reads it.

It never makes its writer wait: at the limit `put` raises, and the writer decides what that means.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from rolloutbus.bus.wire.errors import ActorStopped, MailboxFull

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """Gauges of a mailbox, in items."""

    size: int
    """Waiting to be taken."""
    limit: int
    peak: int
    """The most that ever waited."""
    total: int
    """Ever put in."""


class Mailbox(Generic[T]):
    """First in, first out, at most `limit` items. An async iterator that stops after the last.

    The writer's last word is `end`: what waits may still be taken. The owner's is `close`: it
    takes what waits and nobody else gets anything.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a mailbox holds at least one item, not {limit}")
        self._limit = limit
        self._items: deque[T] = deque()
        self._arrival = asyncio.Event()
        self._has_ended = False
        self._peak = 0
        self._total = 0

    def __len__(self) -> int:
        return len(self._items)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except ActorStopped:
            raise StopAsyncIteration from None

    def put(self, item: T) -> None:
        """Add an item.

        Raises:
            MailboxFull: `limit` items wait; this one was not added.
            ActorStopped: it was ended or closed.
        """
        if self._has_ended:
            raise ActorStopped("the mailbox takes no more")
        if len(self._items) >= self._limit:
            raise MailboxFull(f"{self._limit} items wait already")
        self._items.append(item)
        self._total += 1
        self._peak = max(self._peak, len(self._items))
        self._arrival.set()

    async def get(self) -> T:
        """Take the oldest item; waits for one.

        Raises:
            ActorStopped: none is left and none will come.
        """
        while not self._items:
            if self._has_ended:
                raise ActorStopped("the mailbox has ended")
            self._arrival.clear()
            await self._arrival.wait()
        return self._items.popleft()

    def end(self) -> None:
        """Nothing more will come: readers get what is there, and then the end."""
        self._has_ended = True
        self._arrival.set()

    def close(self) -> list[T]:
        """End it at once; returns the items that were not taken, for the owner to answer."""
        left = list(self._items)
        self._items.clear()
        self.end()
        return left

    def statistics(self) -> MailboxStatistics:
        """Its gauge."""
        return MailboxStatistics(
            size=len(self._items),
            limit=self._limit,
            peak=self._peak,
            total=self._total,
        )
