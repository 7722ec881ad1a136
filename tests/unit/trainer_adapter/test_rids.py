"""Names of requests: never used twice, in order, and not to be guessed from each other."""

import itertools

import pytest

from rolloutbus.bus.wire.validation import MAX_RID_BYTES, check_rid
from tests.unit.trainer_adapter.bench import Bench


def test_rids_carry_128_random_bits_and_keep_their_order() -> None:
    bench = Bench()
    rids = [bench.generate() for _ in range(100)]
    assert all(check_rid(rid) is None and len(rid) <= MAX_RID_BYTES for rid in rids)
    numbers = [int(rid.rpartition("/")[2]) for rid in rids]
    assert numbers == sorted(numbers)
    drawn = [number % 2**128 for number in numbers]
    assert len(set(drawn)) == len(drawn)
    n_set = sum(number.bit_count() for number in drawn)
    assert n_set == pytest.approx(100 * 64, rel=0.1)
    gaps = {(later - earlier) % 2**128 for earlier, later in itertools.pairwise(drawn)}
    assert len(gaps) == len(drawn) - 1
