"""How long to wait before the next try: waits that grow by a factor up to a longest one."""

from typing import Protocol

RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 1.0
"""Bounds of the wait before a lost link is made again; so late its return may be noticed."""
MAX_GROWN = 64
"""After so many tries a wait grows no more: larger powers would overflow."""


class Chance(Protocol):
    """The part of `random.Random` that cores may use; always passed in."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


def wait_after(n_tries: int, first_s: float, max_s: float, factor: float = 2.0) -> float:
    """Seconds to wait before the next try, after so many in vain; none after none.

    The first wait is `first_s`; each is `factor` times the one before, and at most `max_s`.
    """
    if n_tries <= 0:
        return 0.0
    return min(first_s * factor ** min(n_tries - 1, MAX_GROWN), max_s)


class Backoff:
    """Waits drawn uniformly below a bound that doubles from `first_s` to `ceiling_s`."""

    def __init__(self, first_s: float, ceiling_s: float, chance: Chance) -> None:
        self._first_s = first_s
        self._ceiling_s = ceiling_s
        self._chance = chance
        self._n_tries = 0

    def next_s(self) -> float:
        """Seconds to wait before the next try."""
        self._n_tries += 1
        return self._chance.random() * wait_after(self._n_tries, self._first_s, self._ceiling_s)

    def reset(self) -> None:
        """A try succeeded: the next failure waits shortly again."""
        self._n_tries = 0
