"""How many requests may be sent again, by how many were sent for the first time."""

from collections import deque
from math import floor

WINDOW_S = 10
PART = 0.1
"""Retries per first send, over the window."""
LEAST_PER_S = 10
"""Retries that are always allowed."""


class RetryBudget:
    """Counts sends per whole second over the last 10 s."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        """[second, first sends, retries], oldest first."""

    def first_sent(self, now: float) -> None:
        """Counts a request that is sent for the first time."""
        self._second(now)[1] += 1

    def wait_s(self, now: float) -> float:
        """Take one retry: 0 if there is one now, else the seconds until asking again."""
        second = self._second(now)
        n_first = sum(each[1] for each in self._seconds)
        n_retries = sum(each[2] for each in self._seconds)
        if n_retries < max(PART * n_first, LEAST_PER_S * WINDOW_S):
            second[2] += 1
            return 0.0
        return floor(now) + 1 - now

    def _second(self, now: float) -> list[int]:
        """The running second's counts."""
        number = floor(now)
        seconds = self._seconds
        while seconds and seconds[0][0] <= number - WINDOW_S:
            seconds.popleft()
        if not seconds or seconds[-1][0] != number:
            seconds.append([number, 0, 0])
        return seconds[-1]
