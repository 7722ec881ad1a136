"""How fast a lane moves: requests started per second while somebody waited in it."""

from collections import deque

WINDOW_S = 10
MIN_STARTS = 10
"""Below this many starts nothing is estimated: nobody is refused on a guess."""


class ServiceRate:
    """Starts per whole second; seconds without any are left out.

    That makes the estimate optimistic after a pause: what it says cannot be done, cannot.
    """

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        """(second, starts), oldest first."""

    def started(self, now: float) -> None:
        """One more request left the lane for a worker."""
        second = int(now)
        seconds = self._seconds
        if seconds and seconds[-1][0] == second:
            seconds[-1] = (second, seconds[-1][1] + 1)
            return
        seconds.append((second, 1))
        self._drop_old(second)

    def per_s(self, now: float) -> float | None:
        """Starts per second lately; None when too little is known.

        The first and the running second are part of the sum, not whole: both count for one.
        """
        self._drop_old(int(now))
        n_starts = sum(count for _, count in self._seconds)
        if n_starts < MIN_STARTS or len(self._seconds) < 2:  # noqa: PLR2004 - one may be a burst
            return None
        return n_starts / (len(self._seconds) - 1)

    def _drop_old(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()
