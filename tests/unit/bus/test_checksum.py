# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.weights.manifest import checksum, checksums_by, checksums_on_device

SIZES = st.integers(min_value=0, max_value=400)


def by_definition(content: bytes) -> int:
    """As docs/protocol.md has it."""
    padded = content + bytes(-len(content) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


@given(st.lists(SIZES, max_size=4), st.integers(0, 2**32), st.integers(2, 20), st.integers(1, 60))
def test_numpy_and_torch_compute_what_the_protocol_says_whatever_rows_and_blocks(
    sizes: list[int], seed: int, columns: int, block_words: int
) -> None:
    contents = [random_bytes(size, seed + i) for i, size in enumerate(sizes)]
    in_numpy = [np.frombuffer(each, np.uint8) for each in contents]
    in_torch = [torch.from_numpy(each.copy()) for each in in_numpy]
    odd = np.arange(1, 2 * columns, 2, dtype=np.uint64)
    found = [
        [checksum(each) for each in in_numpy],
        checksums_by(in_numpy, odd),
        checksums_by(in_numpy, odd, block_words=block_words),
        checksums_by(in_torch, torch.arange(1, 2 * columns, 2)),
        checksums_on_device(torch, in_torch),
    ]
    assert found == [[by_definition(each) for each in contents]] * 5


def test_a_sum_above_the_largest_word_wraps_around_in_both() -> None:
    content = np.full(4_000_003, 255, np.uint8)
    expected = by_definition(content.tobytes())
    assert checksum(content) == expected
    assert checksums_on_device(torch, [torch.from_numpy(content)]) == [expected]


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
