"""Waits grow, stay below their ceiling, and differ between processes."""

import random

from rolloutbus.bus.backoff import Backoff


class Highest:
    def random(self) -> float:
        return 1.0


def test_bound_doubles_up_to_the_ceiling_and_falls_back_on_success() -> None:
    backoff = Backoff(0.1, 5.0, Highest())
    waits = [backoff.next_s() for _ in range(8)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_waits_are_spread_over_the_whole_interval(rng: random.Random) -> None:
    backoff = Backoff(1.0, 1.0, rng)
    waits = [backoff.next_s() for _ in range(1000)]
    assert min(waits) < 0.05
    assert max(waits) > 0.95
