"""Which beginnings of prompts a cache holds, by their marks, from the blocks that it keeps.

An engine tells of its blocks as they come and go; what is told onwards is little: see
`bus.prefix_marks`. Blocks may be of any size, and are known here by the engine's own keys.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass

from rolloutbus.bus.prefix_hashes import ROOT, ChainLink
from rolloutbus.bus.wire.messages.prefixes import Prefixes
from rolloutbus.engine_worker.prefixes import PrefixHashSet


@dataclass(slots=True)
class _Block:
    end: ChainLink
    marks: tuple[int, ...]
    """Of beginnings that end in this block."""
    tiers: int
    """Bits: where it is kept."""


class CachedPrefixes:
    """Any thread may call; a block whose predecessor is unknown is of no use and left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, _Block] = {}
        self._book = PrefixHashSet()

    def stored(self, key: Hashable, parent: Hashable | None, tokens: bytes, tier: int = 1) -> None:
        """A block of int32 [n] tokens is kept, after the block `parent`; None: it is the first."""
        with self._lock:
            known = self._blocks.get(key)
            if known is not None:
                known.tiers |= tier
                return
            before = self._blocks.get(parent) if parent is not None else None
            if before is None and parent is not None:
                return
            end, marks = (before.end if before is not None else ROOT).extended(tokens)
            self._blocks[key] = _Block(end, tuple(marks), tier)
            for mark in marks:
                self._book.add(mark)

    def removed(self, key: Hashable, tier: int = 1) -> None:
        """A block is kept no more, in this tier at least."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                return
            block.tiers &= ~tier
            if block.tiers:
                return
            del self._blocks[key]
            for mark in block.marks:
                self._book.drop(mark)

    def cleared(self) -> None:
        """Nothing that was kept is of any use any more."""
        with self._lock:
            if self._blocks:
                self._blocks.clear()
                self._book.clear()

    def take(self) -> Prefixes | None:
        """What has changed since the last call, or a part of it; None: nothing."""
        with self._lock:
            return self._book.take() if self._book.has_news else None
