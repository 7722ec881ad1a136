"""What engines say of their load: gauges by worker, and those whose names we know. Pure."""

from collections.abc import Mapping

from rolloutbus.bus.wire.messages.control import Load
from rolloutbus.trainer_adapter.client.core.results import FleetResult

Gauges = Mapping[str, Mapping[str, float]]
"""Worker -> its engine's gauges, by the engine's own names."""


def loads_of(result: FleetResult) -> Gauges:
    """The gauges of those that answered with some."""
    return {name: each.gauges for name, each in result.by_worker.items() if isinstance(each, Load)}


def cache_used(gauges: Mapping[str, float]) -> float | None:
    """Share of the key-value cache that is in use, by the names of the engines that we know."""
    used = gauges.get("n_kv_blocks_used")
    if used is not None:
        whole = used + gauges.get("n_kv_blocks_idle", 0.0) + gauges.get("n_kv_blocks_free", 0.0)
        return used / whole if whole else None
    return gauges.get("token_usage")
