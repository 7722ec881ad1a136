"""Who swaps next."""

import pytest

from rolloutbus.router.updates.record import next_wave

FOUR = ["w0", "w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("floor", "wave"),
    [(0, FOUR), (1, ["w0", "w1", "w2"]), (3, ["w0"]), (4, ["w0"]), (99, ["w0"])],
)
def test_a_wave_leaves_as_many_serving_as_the_floor_says_but_never_nobody_swaps(
    floor: int, wave: list[str]
) -> None:
    assert next_wave(FOUR, FOUR, floor) == wave


def test_workers_that_serve_and_do_not_take_part_count() -> None:
    assert next_wave(["w0", "w1"], FOUR, 2) == ["w0", "w1"]


def test_who_serves_nobody_anyway_does_not_wait() -> None:
    assert next_wave(FOUR, ["w1", "w2"], 1) == ["w0", "w3", "w1"]


def test_while_there_are_such_the_last_who_serve_go_on() -> None:
    assert next_wave(FOUR, ["w1"], 1) == ["w0", "w2", "w3"]
    assert next_wave(["w1"], ["w1"], 1) == ["w1"]
