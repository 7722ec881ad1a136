"""A router's status as metrics: what is told has a sample, and what is not has none."""

from collections.abc import Iterable, Mapping

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rolloutbus.bus.wire.durations import BOUNDS_S, DurationCounter, Durations
from rolloutbus.bus.wire.messages.control import FleetStatus, StoreStatus, WorkerStatus
from rolloutbus.bus.wire.messages.weights import UpdateStatus
from rolloutbus.gateway.fleet_metrics import fleet_families
from rolloutbus.trainer_adapter.client.engine_gauges import Gauges

Samples = Mapping[tuple[str, frozenset[str]], float]
NO_GAUGES: Gauges = {}


class _Registry:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def scraped(status: FleetStatus, gauges: Gauges = NO_GAUGES) -> Samples:
    """(name, values of the labels) -> figure, as Prometheus reads them."""
    text = generate_latest(_Registry(fleet_families(status, gauges))).decode()
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def at(samples: Samples, name: str, *labels: str) -> float | None:
    return samples.get((f"rolloutbus_{name}", frozenset(labels)))


def status(*workers: WorkerStatus, **more: object) -> FleetStatus:
    told = FleetStatus(2, "r", False, list(workers), {"default": 7}, 4, 2, 1, {})  # noqa: FBT003
    return msgspec.structs.replace(told, **more)


def worker(name: str = "w0", **more: object) -> WorkerStatus:
    row = WorkerStatus(name, "b.1", "ready", "default", 6, "fake", 8, 2, 640, 1500, 12.5, 42)
    return msgspec.structs.replace(row, **more)


def test_a_worker_has_its_figures_in_base_units() -> None:
    told = scraped(status(worker(steps=9, free=6), sessions={"w0": 3}))

    assert at(told, "worker_tokens_total", "w0", "default") == 640
    assert at(told, "worker_steps_total", "w0", "default") == 9
    assert at(told, "worker_free_requests", "w0", "default") == 6
    assert at(told, "worker_heartbeat_age_seconds", "w0", "default") == 1.5
    assert at(told, "worker_last_update_stall_seconds", "w0", "default") == 0.0125
    assert at(told, "worker_staleness_versions", "w0", "default") == 1
    assert at(told, "worker_state", "w0", "default", "ready") == 1
    assert at(told, "worker_sessions", "w0", "default") == 3


def test_what_nobody_told_is_absent() -> None:
    told = scraped(status(worker(), committed={}))

    assert at(told, "worker_staleness_versions", "w0", "default") is None
    assert at(told, "router_fenced_total") is None
    assert not [name for name, _ in told if "first_token" in name or "engine" in name]


def test_a_worker_that_is_away_is_shown_as_gone() -> None:
    told = scraped(status(worker(), absent={"w1": "it was lost (expired)", "w0": "a moment ago"}))

    assert at(told, "worker_state", "w1", "", "gone") == 1
    assert at(told, "worker_state", "w0", "", "gone") is None


def test_each_reason_that_blocks_a_worker_is_shown() -> None:
    told = scraped(status(worker(blocked_by={"paused": "It is.", "behind": "It is old."})))

    assert at(told, "worker_blocked", "w0", "default", "paused") == 1
    assert at(told, "worker_blocked", "w0", "default", "behind") == 1


def test_counters_that_are_not_known_here_are_shown_too() -> None:
    told = scraped(status(worker(counters={"hiccups": 4}), counters={"news": 3, "no name!": 5}))

    assert at(told, "router_news_total") == 3
    assert at(told, "worker_hiccups_total", "w0", "default") == 4
    assert 5 not in told.values()


def test_durations_become_histograms() -> None:
    counter = DurationCounter()
    for seconds in (0.001, 0.002, 0.002, 1e9):
        counter.add(seconds)
    told = scraped(status(worker(durations={"first_token": counter.counted()})))
    name = "worker_time_to_first_token_seconds"

    assert at(told, f"{name}_bucket", "w0", "default", "0.001") == 1
    assert at(told, f"{name}_bucket", "w0", "default", "0.0025") == 3
    assert at(told, f"{name}_bucket", "w0", "default", "250.0") == 3
    assert at(told, f"{name}_bucket", "w0", "default", "+Inf") == 4
    assert at(told, f"{name}_count", "w0", "default") == 4
    assert at(told, f"{name}_sum", "w0", "default") == pytest.approx(1e9)


def test_durations_of_other_ranges_are_left_out() -> None:
    other = Durations([1] * len(BOUNDS_S), 1.0)
    told = scraped(status(worker(durations={"first_token": other})))

    assert not [name for name, _ in told if "first_token" in name]


def test_updates_of_one_policy_are_added_up() -> None:
    updates = [
        UpdateStatus("default", 8, "preparing", 500, 4, 1),
        UpdateStatus("default", 7, "preparing", 1500, 1, is_catch_up=True),
        UpdateStatus("default", 7, "preparing", 200, 1, is_catch_up=True),
    ]
    told = scraped(status(updates=updates))

    assert at(told, "weight_updates", "default", "publish", "preparing") == 1
    assert at(told, "weight_updates", "default", "catch_up", "preparing") == 2
    assert at(told, "weight_update_workers", "default", "wanted") == 6
    assert at(told, "weight_update_age_seconds", "default") == 1.5


def test_an_engine_tells_its_cache_under_one_name() -> None:
    told = scraped(status(worker()), {"w0": {"n_kv_blocks_used": 3, "n_kv_blocks_free": 9}})

    assert at(told, "engine_cache_used_ratio", "w0") == 0.25
    assert at(told, "engine_load", "w0", "n_kv_blocks_used") == 3


def test_a_store_tells_what_it_holds() -> None:
    told = scraped(status(store=StoreStatus("store", 250, {"held_bytes": 4096.0})))

    assert at(told, "store_held_bytes", "store") == 4096
    assert at(told, "store_heartbeat_age_seconds", "store") == 0.25
    assert at(told, "store_held_versions", "store") is None
    assert not [name for name, _ in scraped(status()) if "store" in name]


def test_names_with_quotes_and_newlines_are_escaped() -> None:
    odd = 'w"0\\\n'
    told = scraped(status(worker(odd)))

    assert at(told, "worker_slots", odd, "default") == 8
