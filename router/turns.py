"""Whose turn it is: clients that wait share the workers by weight, in estimated tokens.

Start-time fair queueing. Each client has a pass that grows by cost / weight with every request it
starts; the lowest pass goes first. A client that was idle cannot save up turns: when it starts a
request its pass is first raised to the clock, which is the pass of whoever was served last.
"""

from collections.abc import Mapping

REMEMBERED = 10_000
"""Clients whose pass is kept; beyond it those that the clock has overtaken are forgotten."""


class Turns:
    """The passes of all clients of one policy."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._clock = 0.0
        self._passes: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._passes)

    def weight(self, client: str) -> float:
        """Share of a client, against 1.0 for a client that no setting names."""
        return self._weights.get(client, 1.0)

    def pass_of(self, client: str) -> float:
        """Where a client stands; the lowest is next."""
        return self._passes.get(client, 0.0)

    def charge(self, client: str, cost: int) -> None:
        """The client has started a request of `cost` estimated tokens."""
        start = max(self._clock, self.pass_of(client))
        self._clock = start
        if len(self._passes) >= REMEMBERED and client not in self._passes:
            self._forget_overtaken(start)
        self._passes[client] = start + max(1, cost) / self.weight(client)

    def _forget_overtaken(self, clock: float) -> None:
        passes = self._passes
        self._passes = {name: at for name, at in passes.items() if at > clock}
        if len(self._passes) > REMEMBERED // 2:
            # Newcomers do not move the clock. Half of the clients are let off what they owe.
            middle = sorted(self._passes.values())[len(self._passes) // 2]
            self._passes = {name: at for name, at in self._passes.items() if at > middle}
