"""Work on many tensors by several threads: results in order, and none for who has gone."""

import threading

import pytest

from rolloutbus.bus.weights.side_by_side import WORTH_BYTES, n_threads, side_by_side

DEADLINE_S = 240.0


def test_results_come_in_order_and_several_threads_work_at_once() -> None:
    together = threading.Barrier(4, timeout=DEADLINE_S)

    def work(item: int) -> int:
        together.wait()  # passes once four threads are here
        return item * item

    assert [*side_by_side(work, range(8), WORTH_BYTES, n=4)] == [each * each for each in range(8)]


def test_little_is_read_by_the_caller() -> None:
    caller = threading.get_ident()
    found = side_by_side(lambda _: threading.get_ident(), range(3), WORTH_BYTES - 1, n=4)
    assert {*found} == {caller}


def test_an_error_of_one_is_the_callers() -> None:
    def work(item: int) -> int:
        if item == 1:
            raise ValueError("wrong")
        return item

    with pytest.raises(ValueError, match="wrong"):
        list(side_by_side(work, range(100), WORTH_BYTES, n=2))


def test_threads_are_no_more_than_the_cores() -> None:
    assert n_threads() >= 1
    assert [*side_by_side(str, [], WORTH_BYTES)] == []
