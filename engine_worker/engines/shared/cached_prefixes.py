"""Prefix hashes of the beginnings of prompts that a cache holds, from the blocks that it keeps.

Blocks may be of any size, and are known here by the engine's own keys.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass

from rolloutbus.bus.prefix_hashes import ROOT, ChainLink
from rolloutbus.bus.wire.messages.membership import Prefixes
from rolloutbus.engine_worker.prefixes import PrefixHashSet


@dataclass(slots=True)
class _Block:
    end: ChainLink
    prefix_hashes: tuple[int, ...]
    """Of beginnings that end in this block."""
    tiers: int
    """Bits: where it is kept."""


class CachedPrefixes:
    """Prefixes that an engine has cached; thread-safe. Skips blocks without a known predecessor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, _Block] = {}
        self._hashes = PrefixHashSet()

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
            end, hashes = (before.end if before is not None else ROOT).extended(tokens)
            self._blocks[key] = _Block(end, tuple(hashes), tier)
            for each in hashes:
                self._hashes.add(each)

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
            for each in block.prefix_hashes:
                self._hashes.drop(each)

    def cleared(self) -> None:
        """Nothing that was kept can be used any more."""
        with self._lock:
            if self._blocks:
                self._blocks.clear()
                self._hashes.clear()

    def take(self) -> Prefixes | None:
        """Returns what has changed since the last call, or a part of it; None: nothing."""
        with self._lock:
            return self._hashes.take() if self._hashes.has_news else None
