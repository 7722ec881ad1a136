"""Accounting of KV blocks: who holds what, and what may be shared."""

import random

import numpy as np

from rolloutbus.engine_worker.engines.transformers.kv_blocks import KvBlocks, block_keys


def keys(*tokens: int) -> list[bytes]:
    return block_keys(np.array(tokens, np.int32), 2)


def test_a_key_stands_for_all_tokens_before_it() -> None:
    assert len(keys(1, 2, 3, 4, 5)) == 2
    assert keys(1, 2, 3, 4)[0] == keys(1, 2, 9, 9)[0]
    assert keys(9, 9, 3, 4)[1] != keys(1, 2, 3, 4)[1]
    assert block_keys(np.array([1, 2, 3, 4], np.int32), 2, keys(1, 2)) == keys(1, 2, 3, 4)


def test_published_blocks_are_shared_until_forgotten() -> None:
    blocks = KvBlocks(8, is_sharing=True)
    chain = keys(1, 2, 3, 4)
    first = blocks.reserve(3, chain)
    assert first is not None
    assert first.n_shared == 0
    for block, key in zip(first.blocks, chain, strict=False):
        blocks.publish(block, key)
    second = blocks.reserve(3, chain)
    assert second is not None
    assert second.n_shared == 2
    assert second.blocks[:2] == first.blocks[:2]
    assert blocks.n_used == 4
    blocks.forget()
    third = blocks.reserve(3, chain)
    assert third is not None
    assert third.n_shared == 0


def test_too_little_memory_takes_nothing() -> None:
    blocks = KvBlocks(4, is_sharing=True)
    held = blocks.reserve(3, [])
    assert held is not None
    assert blocks.reserve(2, []) is None
    blocks.check_invariants()
    blocks.release(held.blocks)
    assert blocks.reserve(4, []) is not None


def test_idle_content_is_revived_or_evicted_when_memory_is_short() -> None:
    blocks = KvBlocks(4, is_sharing=True)
    chain = keys(1, 2, 3, 4)
    held = blocks.reserve(2, chain)
    assert held is not None
    for block, key in zip(held.blocks, chain, strict=True):
        blocks.publish(block, key)
    blocks.release(held.blocks)
    assert (blocks.n_used, blocks.n_idle) == (0, 2)
    revived = blocks.reserve(4, chain)
    assert revived is not None
    assert (revived.n_shared, blocks.n_idle) == (2, 0)
    blocks.release(revived.blocks)
    other = blocks.reserve(3, [])
    assert other is not None
    short = blocks.reserve(1, chain)
    assert short is not None
    assert short.n_shared == 1, "the head of the prefix outlives its tail"


def test_without_sharing_nothing_is_found() -> None:
    blocks = KvBlocks(4, is_sharing=False)
    held = blocks.reserve(1, keys(1, 2))
    assert held is not None
    blocks.publish(held.blocks[0], keys(1, 2)[0])
    again = blocks.reserve(1, keys(1, 2))
    assert again is not None
    assert again.n_shared == 0


def test_every_block_is_in_one_place_after_any_history(rng: random.Random) -> None:
    blocks = KvBlocks(20, is_sharing=True)
    held: list[list[int]] = []
    for _ in range(3000):
        chain = keys(*[rng.randrange(2) for _ in range(2 * rng.randint(0, 4))])
        what = rng.random()
        if what < 0.5:
            reserved = blocks.reserve(len(chain) + rng.randint(0, 2), chain)
            if reserved is not None:
                for block, key in zip(reserved.blocks, chain, strict=False):
                    blocks.publish(block, key)
                held.append(reserved.blocks)
        elif what < 0.95 and held:
            blocks.release(held.pop(rng.randrange(len(held))))
        elif what < 0.98:
            blocks.evict_idle()
        else:
            blocks.forget()
        blocks.check_invariants()
