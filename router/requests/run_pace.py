"""How long requests run at least, by their estimated cost: the fastest ones of late."""

FORGETS = 1.02
"""The pace slows down by this factor with each request that was slower."""
MIN_ENDED = 32
"""With fewer requests than that nothing is estimated: nobody is given up on a guess."""
MAX_PRINCIPALS = 10_000
"""After so many the memory starts afresh."""


class RunPace:
    """Seconds per estimated token, from dispatch to ending; what it says is too late, is."""

    def __init__(self) -> None:
        self._s_per_token = 0.0
        self._n_ended = 0

    def ended(self, cost: int, seconds: float) -> None:
        """A request of `cost` estimated tokens has run for so long."""
        pace = seconds / max(1, cost)
        known = self._s_per_token
        self._s_per_token = min(pace, known * FORGETS) if known else pace
        self._n_ended += 1

    def least_s(self, cost: int) -> float:
        """At least how long such a request will run; 0 when there is no telling."""
        return self._s_per_token * max(1, cost) if self._n_ended >= MIN_ENDED else 0.0


class RunPaces:
    """The pace of each principal's requests: nobody is judged by what another one ran."""

    def __init__(self) -> None:
        self._by_principal: dict[str, RunPace] = {}

    def ended(self, principal: str, cost: int, seconds: float) -> None:
        """A request of this principal has run for so long."""
        pace = self._by_principal.get(principal)
        if pace is None:
            if len(self._by_principal) >= MAX_PRINCIPALS:
                self._by_principal.clear()
            pace = self._by_principal[principal] = RunPace()
        pace.ended(cost, seconds)

    def least_s(self, principal: str, cost: int) -> float:
        """At least how long such a request of this principal will run; 0 when nobody can tell."""
        pace = self._by_principal.get(principal)
        return 0.0 if pace is None else pace.least_s(cost)
