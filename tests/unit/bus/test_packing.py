"""Sequences cut into runs of a bounded size."""

import pytest

from rolloutbus.bus.wire.codec import runs_within


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], []),
        ([4, 6, 1], [[4, 6], [1]]),
        ([3, 11, 3, 3], [[3], [11], [3, 3]]),
        ([11, 0, 12], [[11], [0], [12]]),
    ],
    ids=["nothing", "exactly full", "one too large", "two too large"],
)
def test_a_run_holds_more_than_the_bound_only_if_one_item_does(
    sizes: list[int], runs: list[list[int]]
) -> None:
    assert runs_within(10, sizes, lambda size: size) == runs
