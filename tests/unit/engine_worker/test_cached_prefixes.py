"""From blocks that a cache keeps to marks of the beginnings that it has."""

import numpy as np
import pytest

from rolloutbus.bus.prefix_hashes import UNIT_TOKENS, marks_of, unpacked
from rolloutbus.engine_worker.engines.shared.cached_prefixes import CachedPrefixes

PROMPT = np.random.default_rng(3).integers(0, 512, 40 * UNIT_TOKENS).astype(np.int32)
DEVICE, HOST = 1, 2


def keep(cached: CachedPrefixes, n_tokens: int, block: int, tier: int = DEVICE) -> list[int]:
    """Store the blocks of the first tokens of the prompt; their keys, in order."""
    keys = list(range(1, n_tokens // block + 1))
    for key in keys:
        tokens = PROMPT[(key - 1) * block : key * block].tobytes()
        cached.stored(key, key - 1 if key > 1 else None, tokens, tier)
    return keys


def added(cached: CachedPrefixes) -> set[int]:
    news = cached.take()
    assert news is not None
    assert not news.removed
    return set(unpacked(news.added))


def marks(n_tokens: int) -> set[int]:
    return set(unpacked(marks_of(PROMPT[:n_tokens].tobytes())))


@pytest.mark.parametrize("block", [1, 16, 48, 64, 100, 256])
def test_blocks_of_any_size_make_the_marks_of_the_prompt(block: int) -> None:
    cached = CachedPrefixes()
    n_kept = len(keep(cached, 20 * UNIT_TOKENS, block)) * block
    assert added(cached) == marks(n_kept)
    assert cached.take() is None


def test_a_removed_block_takes_the_marks_that_end_in_it() -> None:
    cached = CachedPrefixes()
    keys = keep(cached, 4 * UNIT_TOKENS, 16)
    added(cached)
    for key in reversed(keys[-8:]):
        cached.removed(key)
    news = cached.take()
    assert news is not None
    assert set(unpacked(news.removed)) == marks(4 * UNIT_TOKENS) - marks(2 * UNIT_TOKENS)


def test_a_block_that_is_kept_in_two_tiers_is_cached_until_both_gave_it_up() -> None:
    cached = CachedPrefixes()
    (key,) = keep(cached, UNIT_TOKENS, UNIT_TOKENS)
    keep(cached, UNIT_TOKENS, UNIT_TOKENS, HOST)
    added(cached)
    cached.removed(key, DEVICE)
    assert cached.take() is None
    cached.removed(key, HOST)
    assert cached.take() is not None


def test_a_cleared_cache_makes_its_reader_begin_anew() -> None:
    cached = CachedPrefixes()
    keep(cached, UNIT_TOKENS, 16)
    added(cached)
    cached.cleared()
    news = cached.take()
    assert news is not None
    assert (news.seq, news.added) == (0, b"")


def test_a_block_after_an_unknown_one_is_left_out() -> None:
    cached = CachedPrefixes()
    cached.stored("child", "a parent that was missed", PROMPT[:UNIT_TOKENS].tobytes())
    cached.removed("never stored")
    assert cached.take() is None
