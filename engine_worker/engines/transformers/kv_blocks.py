"""Accounts for the blocks of the KV cache: reference counts, free list, prefixes by content.

The tensors are in `PagedKv`. A block is shared when its tokens and all tokens before it are
the same: its key is a digest chain over them. A block may be shared from the forward pass that
fills it on, because in each layer all rows of a pass write before any of them reads.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rolloutbus.engine_worker.engine import Int32s
from rolloutbus.engine_worker.engines.shared.cached_prefixes import CachedPrefixes

TRASH_BLOCK = 0
"""Never given out; what padding writes lands here. No request reads it."""
BLANK_BLOCK = 1
"""Never given out and never written, so all zeros: read where a row has no block of its own."""
N_SPECIAL_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks of one request, in token order; the first `n_shared` are already filled."""

    blocks: list[int]
    n_shared: int


def block_keys(
    tokens: Int32s, block_size: int, known: Sequence[bytes] = (), root: bytes = b""
) -> list[bytes]:
    """Content keys of the full blocks of `tokens`, int32 [n]; the first are already `known`.

    KV is never shared between chains of different roots.
    """
    keys = list(known)
    key = keys[-1] if keys else root
    end = len(tokens) - len(tokens) % block_size
    for start in range(len(keys) * block_size, end, block_size):
        chunk = tokens[start : start + block_size].tobytes()
        key = hashlib.blake2b(chunk, key=key, digest_size=16).digest()
        keys.append(key)
    return keys


class KvBlocks:
    """Accounts for `n_blocks` blocks besides the special ones.

    A request reserves all the blocks it may ever need before it starts. Taking blocks as it grows
    would hold more requests, but would need preemption, and recomputing a preempted request at
    newer weights breaks the promise of in-place updates that old KV stays.
    """

    def __init__(
        self, n_blocks: int, *, is_sharing: bool, news: CachedPrefixes | None = None
    ) -> None:
        self._is_sharing = is_sharing
        self._news = news
        self._n_blocks = n_blocks
        self._refs = [0] * (N_SPECIAL_BLOCKS + n_blocks)
        self._free = list(range(N_SPECIAL_BLOCKS, len(self._refs)))[::-1]
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that hold a known prefix and no request uses, least recently used first."""

    @property
    def n_used(self) -> int:
        """Blocks that requests hold."""
        return self._n_blocks - len(self._free) - len(self._idle)

    @property
    def n_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def n_idle(self) -> int:
        """Blocks kept only for their content."""
        return len(self._idle)

    def reserve(self, n_blocks: int, keys: Sequence[bytes]) -> Reservation | None:
        """Take `n_blocks` blocks, known ones first; None, and nothing taken, if too few are left.

        `keys`: of the request's leading blocks, which may be shared.
        """
        shared: list[int] = []
        for key in keys:
            if (block := self._block_by_key.get(key)) is None:
                break
            shared.append(block)
        n_revived = sum(block in self._idle for block in shared)
        n_fresh = n_blocks - len(shared)
        if n_fresh > len(self._free) + len(self._idle) - n_revived:
            return None
        for block in shared:
            self._idle.pop(block, None)
            self._refs[block] += 1
        blocks = shared + [self._take() for _ in range(n_fresh)]
        return Reservation(blocks, len(shared))

    def publish(
        self, block: int, key: bytes, parent: bytes = b"", tokens: Int32s | None = None
    ) -> None:
        """From now on `block` can be found by its content's `key`, unless another block already is.

        `parent` is the key of the block before it, or the root of its chain; `tokens`, int32
        [block_size], are for the news.
        """
        if self._is_sharing and key not in self._block_by_key and block not in self._key_by_block:
            self._block_by_key[key] = block
            self._key_by_block[block] = key
            if self._news is not None and tokens is not None:
                self._news.stored(key, parent or None, tokens.tobytes())

    def release(self, blocks: Sequence[int]) -> None:
        """Give back what `reserve` gave."""
        # The tail first: it is evicted first, and a prefix without its head is of no use.
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_by_block:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def evict_idle(self) -> int:
        """Forget the content that no request uses; returns how many blocks."""
        n_idle = len(self._idle)
        while self._idle:
            self._free.append(self._evict())
        return n_idle

    def forget(self) -> None:
        """Forget all content: nothing held now is ever shared again."""
        if self._news is not None:  # before it would hear of each block
            self._news.cleared()
        self.evict_idle()
        self._block_by_key.clear()
        self._key_by_block.clear()

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one place."""
        held = {block for block, n_refs in enumerate(self._refs) if n_refs > 0}
        assert held.isdisjoint({TRASH_BLOCK, BLANK_BLOCK})
        assert len(self._free) == len(set(self._free))
        assert held.isdisjoint(self._free)
        assert held.isdisjoint(self._idle)
        assert set(self._free).isdisjoint(self._idle)
        assert len(held) + len(self._free) + len(self._idle) == self._n_blocks
        assert {v: k for k, v in self._block_by_key.items()} == self._key_by_block
        assert set(self._idle) <= set(self._key_by_block)

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._refs[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._key_by_block.pop(block)
        del self._block_by_key[key]
        if self._news is not None:
            self._news.removed(key)
        return block
