"""The placement that SMG calls `cache_aware`, with its default thresholds."""

from collections.abc import Mapping, Sequence
from random import Random

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


class CacheAware:
    """Chooses an engine by what it has sent where, as SMG does over its approximate tree.

    While loads are balanced, a request goes where the longest part of its prompt went, if that is
    a large enough part; else to the least loaded. Among several engines with the same part this
    one takes the least loaded, which is kinder than the first one found. The memory is large
    enough to forget nothing.
    """

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._sent: dict[str, dict[str, int]] = {}
        """Name of a beginning -> engine -> tokens of it that it got."""

    def choose(self, path: Sequence[tuple[str, int]], loads: Mapping[str, int]) -> str:
        """The engine for a prompt; by what was sent before, unless loads differ too much.

        Args:
            path: names of its beginnings, each with the tokens up to its end, shortest first.
            loads: requests at each engine.
        """
        least, most = min(loads.values()), max(loads.values())
        is_unbalanced = (
            most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least
        )
        engine = None if is_unbalanced else self._matching(path, loads)
        if engine is None:
            engine = min(loads, key=lambda each: (loads[each], self._chance.random()))
        for name, end in path:
            self._sent.setdefault(name, {})[engine] = end
        return engine

    def _matching(self, path: Sequence[tuple[str, int]], loads: Mapping[str, int]) -> str | None:
        n_prompt = path[-1][1]
        for name, end in reversed(path):
            sent = self._sent.get(name, {})
            holders = {each: n for each, n in sent.items() if each in loads}
            if holders:
                longest = max(min(n, end) for n in holders.values())
                if longest <= CACHE_THRESHOLD * n_prompt:
                    return None
                same = [each for each, n in holders.items() if min(n, end) == longest]
                return min(same, key=lambda each: loads[each])
        return None
