"""How busy SGLang is, in its own words."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread


class SchedulerMeter:
    """Implements `LoadMeter`."""

    def __init__(
        self, thread: EngineThread, timeout_s: float, more: Callable[[], Mapping[str, float]]
    ) -> None:
        """`more`: gauges of our own."""
        self._thread = thread
        self._timeout_s = timeout_s
        self._more = more

    def load(self) -> Mapping[str, float]:
        """See `LoadMeter`; the schedulers tell nothing while held."""
        manager = self._thread.engine.tokenizer_manager
        loads = self._thread.call(manager.get_loads, self._timeout_s, "get_loads")
        told = gauges_of({each.dp_rank: each.to_dict() for each in loads})
        return {**told, **self._more()}


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
