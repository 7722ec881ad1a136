"""How busy SGLang is, in its own words."""

from collections.abc import Iterator, Mapping
from typing import Any, cast


def gauges_of(loads: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Every number in what the schedulers told of their load, by its path.

    Args:
        loads: what each data parallel rank told; names of those after the first say which it is.
    """
    gauges: dict[str, float] = {}
    for rank, load in loads.items():
        prefix = f"dp{rank}." if rank else ""
        gauges.update((prefix + name, value) for name, value in _numbers(load, ""))
    return gauges


def _numbers(told: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for name, value in told.items():
        if isinstance(value, bool | int | float):
            yield path + name, float(value)
        elif isinstance(value, dict):
            yield from _numbers(cast("dict[str, Any]", value), f"{path}{name}.")
