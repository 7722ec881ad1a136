"""Marks of prompts: the same beginnings have the same ones, wherever they are computed."""

from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.prefix_hashes import (
    MARKED_TOKENS,
    MAX_MARKS,
    ROOT,
    UNIT_TOKENS,
    is_rung,
    marks_of,
    packed,
    unpacked,
)


def tokens(n: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 32000, n).astype("<i4").tobytes()


def test_a_mark_is_a_chain_of_hashes_of_units() -> None:
    prompt = tokens(2 * UNIT_TOKENS)
    first = xxhash.xxh3_64_intdigest(prompt[:256], seed=0)
    second = xxhash.xxh3_64_intdigest(prompt[256:], seed=first)
    assert unpacked(marks_of(prompt)) == (first, second)


def test_prompts_with_a_common_beginning_have_its_marks_in_common() -> None:
    shared = tokens(5 * UNIT_TOKENS)
    one = unpacked(marks_of(shared + tokens(200, seed=1)))
    other = unpacked(marks_of(shared + tokens(300, seed=2)))
    assert one[:5] == other[:5]
    assert set(one[5:]).isdisjoint(other[5:])


def test_a_prompt_shorter_than_a_unit_has_no_mark() -> None:
    assert marks_of(tokens(UNIT_TOKENS - 1)) == b""


def test_beginnings_are_marked_to_within_a_quarter_of_their_length() -> None:
    gaps = pairwise(MARKED_TOKENS)
    assert all(n < m <= n + max(UNIT_TOKENS, n // 4) for n, m in gaps)
    units = [n // UNIT_TOKENS for n in MARKED_TOKENS[:12]]
    assert units == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert MARKED_TOKENS[-1] == 32_768
    assert not is_rung(0)


def test_a_long_prompt_has_a_bounded_number_of_marks() -> None:
    assert len(unpacked(marks_of(tokens(40_000)))) == MAX_MARKS


@given(st.lists(st.integers(0, 150), max_size=12))
def test_a_chain_comes_to_the_same_in_pieces_of_any_size(sizes: list[int]) -> None:
    prompt = tokens(sum(sizes))
    link, found, start = ROOT, list[int](), 0
    for size in sizes:
        link, marks = link.extended(prompt[4 * start : 4 * (start + size)])
        found += marks
        start += size
    assert packed(found) == marks_of(prompt)


@pytest.mark.parametrize("n_odd", range(8))
def test_bytes_that_are_no_whole_mark_are_left_out(n_odd: int) -> None:
    assert unpacked(packed([7, 2**64 - 1]) + bytes(n_odd)) == (7, 2**64 - 1)
