"""How memory is cut that may be page-locked, and what happens where it cannot be."""

import logging
from itertools import pairwise

import numpy as np
import pytest

from rolloutbus.bus.weights.page_lock import SLICE_BYTES, PageLock, cut


@pytest.mark.parametrize("address", [0, 64, SLICE_BYTES - 64, 5 * SLICE_BYTES + 4096])
@pytest.mark.parametrize("size_bytes", [1, 64, SLICE_BYTES, 3 * SLICE_BYTES + 10])
@pytest.mark.parametrize("most_bytes", [SLICE_BYTES // 4, SLICE_BYTES, 2 * SLICE_BYTES])
def test_pieces_cover_all_bytes_and_none_crosses_a_slice(
    address: int, size_bytes: int, most_bytes: int
) -> None:
    pieces = [*cut(address, size_bytes, most_bytes)]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == size_bytes
    assert all(stop == start for (_, stop), (start, _) in pairwise(pieces))
    for start, stop in pieces:
        assert 0 < stop - start <= most_bytes
        assert (address + start) // SLICE_BYTES == (address + stop - 1) // SLICE_BYTES


def test_nothing_is_cut_into_nothing() -> None:
    assert [*cut(64, 0)] == []


def test_a_process_without_cuda_is_told_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    content = np.zeros(1 << 20, np.uint8)
    with caplog.at_level(logging.WARNING):
        lock = PageLock(content, 0)
        lock.wait()
    assert len(caplog.messages) == 1
    assert "page-locked 0 of" in caplog.messages[0]
    assert "is not loaded in this process" in caplog.messages[0]
    content[:] = 7
    lock.close()
    lock.close()
