"""How long to wait before the next try: doubling bounds with full jitter."""

from typing import Protocol


class Chance(Protocol):
    """The part of `random.Random` that cores may use; always passed in."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


class Backoff:
    """Waits drawn uniformly below a bound that doubles from `first_s` to `ceiling_s`."""

    def __init__(self, first_s: float, ceiling_s: float, chance: Chance) -> None:
        self._first_s = first_s
        self._ceiling_s = ceiling_s
        self._chance = chance
        self._bound_s = first_s

    def next_s(self) -> float:
        """Seconds to wait before the next try."""
        wait_s = self._chance.random() * self._bound_s
        self._bound_s = min(2 * self._bound_s, self._ceiling_s)
        return wait_s

    def reset(self) -> None:
        """A try succeeded: the next failure waits shortly again."""
        self._bound_s = self._first_s
