"""The fleet as Prometheus' metric families, out of a router's status and engines' gauges. Pure.

A figure that nobody told or measured has no sample.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from rolloutbus.bus.wire.counters import (
    ROUTER_COUNTERS,
    STORE_GAUGES,
    WORKER_COUNTERS,
    WORKER_DURATIONS,
)
from rolloutbus.bus.wire.durations import BOUNDS_S, Durations
from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.trainer_adapter.client.engine_gauges import Gauges, cache_used

Row = tuple[Sequence[str], float | None]
"""Values of the labels, and the figure; None: it is not known."""

WORKER = ("worker", "policy")
NAME = re.compile("[a-z][a-z0-9_]*")
UNKNOWN_COUNTER = "A counter that this gateway has no sentence for."

WorkerFigures = Sequence[tuple[str, str, Callable[[WorkerStatus], float]]]
"""(name, sentence, figure)."""

WORKER_GAUGES: WorkerFigures = (
    ("version", "Weight version that the worker has active.", lambda w: w.version),
    ("slots", "Requests that the engine runs side by side.", lambda w: w.slots),
    ("running_requests", "Requests that the router has given it.", lambda w: w.n_running),
    ("free_requests", "Requests that it would take now: its credit.", lambda w: w.free),
    (
        "unacknowledged_endings",
        "Endings that wait at the worker for their client's acknowledgement.",
        lambda w: w.n_outbox,
    ),
    (
        "cached_prefixes",
        "Beginnings of prompts that it has cached, as far as the router knows.",
        lambda w: w.n_marks,
    ),
    (
        "heartbeat_age_seconds",
        "Time since the router heard its last heartbeat.",
        lambda w: w.beat_age_ms / 1000,
    ),
    (
        "last_update_stall_seconds",
        "Time for which its last weight update stopped sampling.",
        lambda w: w.stalled_ms / 1000,
    ),
)
WORKER_TOTALS: WorkerFigures = (
    ("tokens", "Tokens sampled since the worker's process started.", lambda w: w.n_tokens),
    ("steps", "Engine steps since the engine started.", lambda w: w.steps),
)
DURATION_NAMES: Mapping[str, str] = {
    "first_token": "time_to_first_token_seconds",
    "next_token": "inter_token_latency_seconds",
    "update_stall": "update_stall_seconds",
}
"""What a worker measures -> its metric's name."""


def fleet_families(status: FleetStatus, gauges: Gauges) -> Iterator[Metric]:
    """All that a router and its workers tell."""
    yield from _of_router(status)
    yield from _of_workers(status)
    yield from _of_store(status)
    yield from _of_updates(status)
    yield from _of_engines(gauges)


def gauge(name: str, sentence: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """A family of gauges; rows without a figure are left out."""
    family = GaugeMetricFamily(f"rolloutbus_{name}", sentence, labels=labels)
    for values, figure in rows:
        if figure is not None:
            family.add_metric(values, figure)
    return family


def counter(name: str, sentence: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """A family of counters; its name ends with `_total`."""
    family = CounterMetricFamily(f"rolloutbus_{name}", sentence, labels=labels)
    for values, figure in rows:
        if figure is not None:
            family.add_metric(values, figure)
    return family


def histogram(
    name: str,
    sentence: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Durations]],
) -> Metric:
    """A family of histograms in seconds; ranges of another protocol are left out."""
    family = HistogramMetricFamily(f"rolloutbus_{name}", sentence, labels=labels)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for values, told in rows:
        if len(told.counts) == len(bounds):
            buckets = list(zip(bounds, map(float, accumulate(told.counts)), strict=True))
            family.add_metric(values, buckets, told.total_s)
    return family


def _of_router(status: FleetStatus) -> Iterator[Metric]:
    def fleet(name: str, sentence: str, figure: float) -> Metric:
        return gauge(name, sentence, (), [((), figure)])

    yield fleet("router_epoch", "How often the fleet has had a new router.", status.router_epoch)
    yield fleet(
        "router_recovering",
        "1 while a router that has just started learns what runs; else 0.",
        status.recovering,
    )
    yield fleet("queued_requests", "Requests that wait at the router.", status.n_queued)
    yield fleet("running_requests", "Requests that are at workers.", status.n_running)
    yield fleet("clients", "Clients that are connected.", status.n_clients)
    yield fleet("sessions", "Open sessions that have a place.", sum(status.sessions.values()))
    yield gauge(
        "paused",
        "1 for the mode in which the whole fleet is to be paused.",
        ("mode",),
        [((status.pause,), 1)] if status.pause else [],
    )
    yield gauge(
        "committed_version",
        "Weight version of the policy that was committed last.",
        ("policy",),
        [((policy,), version) for policy, version in status.committed.items()],
    )
    for name in [*ROUTER_COUNTERS, *_more(status.counters, ROUTER_COUNTERS)]:
        sentence = ROUTER_COUNTERS.get(name, UNKNOWN_COUNTER)
        yield counter(f"router_{name}", sentence, (), [((), status.counters.get(name))])


def _of_workers(status: FleetStatus) -> Iterator[Metric]:
    workers = status.workers
    here = {each.name for each in workers}
    states = [((each.name, each.policy, each.state), 1.0) for each in workers]
    gone = [((name, "", "gone"), 1.0) for name in status.absent if name not in here]
    yield gauge(
        "worker_state",
        "1 for the state that the worker is in; gone: it is expected, and not here.",
        (*WORKER, "state"),
        [*states, *gone],
    )
    yield gauge(
        "worker_blocked",
        "1 for each reason for which the worker gets no requests.",
        (*WORKER, "reason"),
        [((each.name, each.policy, reason), 1.0) for each in workers for reason in each.blocked_by],
    )
    yield gauge(
        "worker_staleness_versions",
        "Versions by which the worker is behind the committed one.",
        WORKER,
        [(_labels(each), _staleness(each, status)) for each in workers],
    )
    yield gauge(
        "worker_sessions",
        "Open sessions that have their place at the worker.",
        WORKER,
        [(_labels(each), status.sessions.get(each.name, 0)) for each in workers],
    )
    for name, sentence, figure in WORKER_GAUGES:
        yield gauge(
            f"worker_{name}", sentence, WORKER, [(_labels(each), figure(each)) for each in workers]
        )
    for name, sentence, figure in WORKER_TOTALS:
        yield counter(
            f"worker_{name}", sentence, WORKER, [(_labels(each), figure(each)) for each in workers]
        )
    counted = {name for each in workers for name in each.counters}
    for name in [*WORKER_COUNTERS, *_more(counted, WORKER_COUNTERS)]:
        sentence = WORKER_COUNTERS.get(name, UNKNOWN_COUNTER)
        rows = [(_labels(each), each.counters.get(name)) for each in workers]
        yield counter(f"worker_{name}", sentence, WORKER, rows)
    for name, metric in DURATION_NAMES.items():
        yield histogram(
            f"worker_{metric}",
            WORKER_DURATIONS[name],
            WORKER,
            [(_labels(w), w.durations[name]) for w in workers if name in w.durations],
        )


def _of_store(status: FleetStatus) -> Iterator[Metric]:
    labels, store = ("store",), status.store
    yield gauge(
        "store_heartbeat_age_seconds",
        "Time since the router heard the store's last heartbeat; absent: no store is connected.",
        labels,
        [] if store is None else [((store.name,), store.beat_age_ms / 1000)],
    )
    for name, sentence in STORE_GAUGES.items():
        rows = [] if store is None else [((store.name,), store.gauges.get(name))]
        yield gauge(f"store_{name}", sentence, labels, rows)


def _of_updates(status: FleetStatus) -> Iterator[Metric]:
    n_updates: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    n_workers: defaultdict[tuple[str, str], int] = defaultdict(int)
    oldest_s: defaultdict[tuple[str], float] = defaultdict(float)
    for each in status.updates:
        n_updates[each.policy, "catch_up" if each.is_catch_up else "publish", each.phase] += 1
        n_workers[each.policy, "wanted"] += each.n_targets
        n_workers[each.policy, "prepared"] += each.n_prepared
        n_workers[each.policy, "active"] += each.n_active
        oldest_s[each.policy,] = max(oldest_s[each.policy,], each.age_ms / 1000)
    yield gauge(
        "weight_updates",
        "Weight updates under way, of all workers or of one that is behind, by their phase.",
        ("policy", "kind", "phase"),
        n_updates.items(),
    )
    yield gauge(
        "weight_update_workers",
        "Workers of the updates under way: wanted, prepared, active.",
        ("policy", "stage"),
        n_workers.items(),
    )
    yield gauge(
        "weight_update_age_seconds",
        "Time since the oldest update under way began.",
        ("policy",),
        oldest_s.items(),
    )


def _of_engines(gauges: Gauges) -> Iterator[Metric]:
    yield gauge(
        "engine_cache_used_ratio",
        "Share of the engine's key-value cache in use, where it tells.",
        ("worker",),
        [((worker,), cache_used(named)) for worker, named in gauges.items()],
    )
    yield gauge(
        "engine_load",
        "What the engine tells of its load, under its own name.",
        ("worker", "figure"),
        [((w, name), figure) for w, named in gauges.items() for name, figure in named.items()],
    )


def _labels(worker: WorkerStatus) -> tuple[str, str]:
    return worker.name, worker.policy


def _staleness(worker: WorkerStatus, status: FleetStatus) -> float | None:
    committed = status.committed.get(worker.policy)
    return None if committed is None else max(0, committed - worker.version)


def _more(names: Iterable[str], known: Mapping[str, str]) -> list[str]:
    """Counters of a newer actor."""
    return sorted(name for name in names if name not in known and NAME.fullmatch(name))
