# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.weights.manifest import checksum, checksum_by

SIZES = st.integers(min_value=0, max_value=400)


def by_definition(content: bytes) -> int:
    """As docs/protocol.md has it."""
    padded = content + bytes(-len(content) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


@given(SIZES, st.integers(0, 2**32), st.integers(1, 20))
def test_numpy_and_torch_compute_what_the_protocol_says_whatever_the_chunk(
    size: int, seed: int, chunk_words: int
) -> None:
    content = random_bytes(size, seed)
    in_numpy = np.frombuffer(content, np.uint8)
    in_torch = torch.from_numpy(in_numpy.copy())
    odd = np.arange(1, 2 * chunk_words, 2, dtype=np.uint64)
    found = [
        checksum(in_numpy),
        checksum_by(in_numpy, odd),
        checksum_by(in_torch, torch.arange(1, 2 * chunk_words, 2)),
        checksum_by(
            in_torch,
            torch.arange(1, 2 * chunk_words, 2),
            lambda sums: cast("list[int]", torch.stack(sums).tolist()),
        ),
    ]
    assert found == [by_definition(content)] * 4


def test_a_sum_above_the_largest_word_wraps_around_in_both() -> None:
    content = np.full(800_000, 255, np.uint8)
    expected = by_definition(content.tobytes())
    assert checksum(content) == expected
    assert checksum_by(torch.from_numpy(content), torch.arange(1, 2048, 2)) == expected


@given(st.integers(1, 400), st.integers(0, 2**32), st.data())
def test_every_flipped_bit_changes_it(size: int, seed: int, data: st.DataObject) -> None:
    content = np.frombuffer(random_bytes(size, seed), np.uint8).copy()
    before = checksum(content)
    bit = data.draw(st.integers(0, 8 * size - 1))
    content[bit // 8] ^= 1 << (bit % 8)
    assert checksum(content) != before


def test_two_words_that_change_places_change_it() -> None:
    content = np.arange(2, dtype=np.uint64)
    assert checksum(content.view(np.uint8)) != checksum(content[::-1].copy().view(np.uint8))
