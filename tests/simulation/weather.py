"""The simulated network's moods: latency, cuts in both or one direction, lost publications."""

from random import Random

BREAK_AFTER_S = 3.5
"""A cut longer than this breaks the links it holds up, as transport heartbeats do."""


class SimWeather:
    """Delays and cuts, drawn from one seeded source."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._cuts: dict[tuple[str, str], float] = {}
        self.now = 0.0
        self.publish_loss = chance.choice([0.0, 0.0, 0.02, 0.2])
        self.latency_s = chance.choice([0.0002, 0.001, 0.01])

    def cut(self, source: str, target: str, until: float) -> None:
        """Nothing gets from `source` to `target` before `until`."""
        self._cuts[source, target] = until

    def delay_s(self, source: str, target: str) -> float | None:
        """Latency, or what is left of a cut."""
        latency_s = self.latency_s * (0.5 + self._chance.random())
        left_s = self._cuts.get((source, target), 0.0) - self.now
        if left_s <= 0:
            return latency_s
        return None if left_s > BREAK_AFTER_S else left_s + latency_s

    def loses_published(self, source: str, target: str) -> bool:
        """Publications are dropped at random and in every cut."""
        is_cut = self._cuts.get((source, target), 0.0) > self.now
        return is_cut or self._chance.random() < self.publish_loss
