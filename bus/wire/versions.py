"""Version rules: which weights a `generate` may be sampled with, as text and as a test.

Spec: docs/protocol.md, "Version rules".
"""

import re
from dataclasses import dataclass
from typing import Literal

from rolloutbus.bus.wire.messages.endings import Problem

VersionRuleKind = Literal["any", "latest", "min", "exact", "min-tag", "max-staleness"]

MAX_VERSION = 2**64 - 1
"""Versions are uint64."""

_PLAIN: dict[str, VersionRuleKind] = {"any": "any", "latest": "latest"}
_NUMBERED: dict[str, VersionRuleKind] = {
    "min": "min",
    "exact": "exact",
    "min-tag": "min-tag",
    "max-staleness": "max-staleness",
}
# Canonical decimals only: two texts never mean the same rule.
_NUMBERED_TEXT = re.compile(r"(min|exact|min-tag|max-staleness):(0|[1-9][0-9]{0,19})")
VERSIONS_TEXT = re.compile(rf"any|latest|{_NUMBERED_TEXT.pattern}")
"""A version rule, its range left out."""
VERSIONS_WANTED = "any, latest, min:V, exact:V, min-tag:T or max-staleness:K"


@dataclass(frozen=True, slots=True)
class VersionRule:
    """One version rule; judged against the last committed version when it is dispatched."""

    kind: VersionRuleKind
    value: int = 0
    """The V of `min:V` and `exact:V`, the T of `min-tag:T`, the K of `max-staleness:K`; else 0."""

    def __str__(self) -> str:
        return self.kind if self.kind in _PLAIN else f"{self.kind}:{self.value}"

    def accepts(self, version: int, committed: int) -> bool:
        """Whether weights `version` will do while `committed` is the last committed version."""
        match self.kind:
            case "any":
                return True
            case "exact":
                return version == self.value
            case "min-tag":
                return False  # the router knows no such version; once it does, it asks for `min:V`
            case _:
                return version >= self._lowest(committed)

    def is_retired(self, committed: int) -> bool:
        """Whether no worker can serve it any more: none goes back behind what is committed."""
        return self.kind == "exact" and self.value < committed

    @property
    def needs_committed(self) -> bool:
        """Whether it means nothing without the last committed version."""
        return self.kind in ("latest", "max-staleness")

    def concrete(self, committed: int) -> str:
        """The rule without reference to `committed`: `any`, `min:V` or `exact:V`.

        A worker judges what it is sent by its own version alone, so the router rewrites
        `latest` and `max-staleness:K` when it dispatches.
        """
        match self.kind:
            case "any" | "exact":
                return str(self)
            case _:
                return f"min:{self._lowest(committed)}"

    def _lowest(self, committed: int) -> int:
        match self.kind:
            case "latest":
                return committed
            case "max-staleness":
                return max(0, committed - self.value)
            case _:
                return self.value


def parse_versions(text: str) -> VersionRule | Problem:
    """A version rule from its text, or why it is none (field `place.versions`)."""
    if text in _PLAIN:
        return VersionRule(_PLAIN[text])
    found = _NUMBERED_TEXT.fullmatch(text)
    if found is None:
        return _problem(f"{text[:40]!r} is no version rule; use {VERSIONS_WANTED}")
    kind, value = _NUMBERED[found[1]], int(found[2])
    if value > MAX_VERSION:
        return _problem(f"{kind} wants a number up to {MAX_VERSION}")
    return VersionRule(kind, value)


def _problem(message: str) -> Problem:
    return Problem("bad_request", message, "not_started", field="place.versions")
