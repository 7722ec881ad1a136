"""Which workers a policy counts on: those launched with the router, and those seen lately.

Spec: docs/protocol.md, "Weights", 2.
"""

from collections.abc import Mapping
from typing import NamedTuple

TERMS = 10
"""A worker that was lost is expected back for so many lease terms."""
MAX_LOST = 1000
"""More lost workers than this are not remembered; the oldest go first."""
LEFT = frozenset({"shutdown", "left"})
"""Farewells of workers that do not come back by themselves."""


class _Absent(NamedTuple):
    policy: str
    why: str
    until: float
    """When it is not expected any more, seconds."""


class ExpectedWorkers:
    """Workers that are not on the bus and are counted all the same. Pure; `now` is in seconds."""

    def __init__(self, launched: Mapping[str, str], lease_s: float) -> None:
        """Expect the launched ones, worker -> policy, until they leave in good order."""
        self._launched = dict(launched)
        self._patience_s = TERMS * lease_s
        self._absent = {
            name: _Absent(policy, "it was launched and has not joined yet", float("inf"))
            for name, policy in launched.items()
        }

    @property
    def are_told(self) -> bool:
        """Whether they are known from the start, not only once they were seen."""
        return bool(self._launched)

    def joined(self, name: str) -> None:
        """It is on the bus."""
        self._absent.pop(name, None)

    def lost(self, name: str, policy: str, reason: str, now: float) -> None:
        """It is not on the bus any more."""
        self._absent.pop(name, None)
        if reason in LEFT:
            self._launched.pop(name, None)
            return
        until = float("inf") if name in self._launched else now + self._patience_s
        self._absent[name] = _Absent(policy, f"it was lost ({reason})", until)
        if len(self._absent) > MAX_LOST + len(self._launched):
            oldest = next(each for each in self._absent if each not in self._launched)
            del self._absent[oldest]

    def tick(self, now: float) -> None:
        """Give up those that stayed away for too long."""
        for name in [name for name, each in self._absent.items() if each.until <= now]:
            del self._absent[name]

    def missing(self, policy: str) -> dict[str, str]:
        """Workers of the policy that are expected and not on the bus -> why not."""
        return {name: each.why for name, each in self._absent.items() if each.policy == policy}

    def absent(self) -> list[str]:
        """Workers of whatever policy that are expected and not on the bus."""
        return list(self._absent)
