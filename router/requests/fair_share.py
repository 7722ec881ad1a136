"""Whose turn it is: who waits shares the workers by weight, in estimated tokens.

Start-time fair queueing, twice: principals (keys of one owner) share the workers, and the names of
one principal share what that one gets. So nobody gets more by taking more names. Where there are no
keys each client is a principal of its own.
"""

from collections.abc import Mapping

REMEMBERED = 10_000
"""Names whose pass is kept; beyond it those that the clock has overtaken are forgotten."""


class Passes:
    """A pass for each name; the lowest goes first.

    It grows by cost / weight with every request that the name starts. A name that was idle cannot
    save up turns: when it starts a request its pass is first raised to the clock, which is the pass
    of whoever was served last.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._clock = 0.0
        self._passes: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._passes)

    def of(self, name: str) -> float:
        """Where a name stands; the lowest is next."""
        return self._passes.get(name, 0.0)

    def charge(self, name: str, cost: int) -> None:
        """It has started a request of `cost` estimated tokens."""
        start = max(self._clock, self.of(name))
        self._clock = start
        if len(self._passes) >= REMEMBERED and name not in self._passes:
            self._forget_overtaken(start)
        self._passes[name] = start + max(1, cost) / self._weights.get(name, 1.0)

    def _forget_overtaken(self, clock: float) -> None:
        passes = self._passes
        self._passes = {name: at for name, at in passes.items() if at > clock}
        if len(self._passes) > REMEMBERED // 2:
            # Newcomers do not move the clock. Half of the names are let off what they owe.
            middle = sorted(self._passes.values())[len(self._passes) // 2]
            self._passes = {name: at for name, at in self._passes.items() if at > middle}


class Turns:
    """The passes of all principals of one policy, and of the names of each."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.principals = Passes(weights)
        self._names: dict[str, Passes] = {}
        """Principal -> the passes of its clients."""

    def weight(self, name: str) -> float:
        """Share of a principal or of a client, against 1.0 for one that no setting names."""
        return self._weights.get(name, 1.0)

    def clients_of(self, principal: str) -> Passes:
        """The passes of the clients of one principal."""
        names = self._names.get(principal)
        if names is None:
            if len(self._names) >= REMEMBERED:
                self._names.clear()  # what the names of one principal owe each other, no more
            names = self._names[principal] = Passes(self._weights)
        return names

    def charge(self, principal: str, client: str, cost: int) -> None:
        """The client of this principal has started a request of `cost` estimated tokens."""
        self.principals.charge(principal, cost)
        self.clients_of(principal).charge(client, cost)
