"""Cuts a sequence into runs that are not too large, in order."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def runs_within(
    max_bytes: int, items: Iterable[Item], bytes_of: Callable[[Item], int]
) -> list[list[Item]]:
    """Runs of at most `max_bytes` each; an item that has more is alone in its own."""
    runs: list[list[Item]] = []
    left = 0
    for item in items:
        size_bytes = bytes_of(item)
        if not runs or size_bytes > left:
            runs.append([])
            left = max_bytes
        runs[-1].append(item)
        left -= size_bytes
    return runs
