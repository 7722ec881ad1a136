"""A fleet at one moment, with rates, as `top` and the page of a gateway show it. Pure.

The numbers of a worker are those of its last heartbeat, which comes every half second: rates are
taken between heartbeats, not between questions.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.bus.wire.messages.weights import UpdateStatus
from rolloutbus.trainer_adapter.client.engine_gauges import Gauges, cache_used

STILL_S = 2.0
"""A worker without a heartbeat for so long is shown as sampling nothing."""
MIN_APART_S = 0.1
"""Ages of heartbeats are rounded and answers take time: closer ones are the same heartbeat."""
KEPT = 120
"""Frames whose totals are remembered."""


class TopRow(msgspec.Struct, frozen=True):
    """One worker."""

    name: str
    state: str
    policy: str
    engine: str
    version: int
    n_behind: int
    """Versions that were committed since the one that it has."""
    n_running: int
    slots: int
    n_sessions: int
    tokens_per_s: float | None
    """None until two heartbeats were seen."""
    n_tokens: int
    """Since its process began."""
    stalled_ms: float
    """Generation stall of its last update."""
    n_updates: int
    """Versions that it changed to while it was watched."""
    beat_age_ms: int
    cache_used: float | None
    """Share of the engine's key-value cache; None: it does not say."""
    gauges: dict[str, float]
    problem: str
    """Why it gets no work; empty: it does, or its state says it."""
    blocked_by: dict[str, str]
    """All reasons for which the router sends it no requests, and a sentence for each."""


class TopFrame(msgspec.Struct, frozen=True):
    """Everything at one moment."""

    at_s: float
    """Of the clock that the caller reads."""
    router_epoch: int
    is_recovering: bool
    committed: dict[str, int]
    n_clients: int
    n_sessions: int
    n_queued: int
    n_running: int
    n_slots: int
    tokens_per_s: float
    updates: list[UpdateStatus]
    troubled: dict[str, str]
    """Workers that fail too much, gone ones too -> what failed last."""
    absent: dict[str, str]
    """Workers that are expected and not here -> why not."""
    counted: dict[str, int]
    """What the router counted since the frame before."""
    rows: list[TopRow]


class _Seen(NamedTuple):
    """What was known of a worker after its last heartbeat."""

    boot: str
    at_s: float
    n_tokens: int
    per_s: float | None
    version: int
    n_updates: int


class TopHistory:
    """Remembers what rates need."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._counters: dict[str, int] | None = None
        self._instance = ""
        self.totals: deque[float] = deque(maxlen=KEPT)
        """Tokens per second of the frames so far."""

    def frame(self, status: FleetStatus, gauges: Gauges, now_s: float) -> TopFrame:
        """One frame more."""
        if status.instance != self._instance:
            self._instance, self._counters = status.instance, None
        workers = sorted(status.workers, key=lambda each: (len(each.name), each.name))
        rows = [self._row(each, status, gauges.get(each.name, {}), now_s) for each in workers]
        self._seen = {each.name: self._seen[each.name] for each in workers}
        total = sum(each.tokens_per_s or 0.0 for each in rows)
        self.totals.append(total)
        before, self._counters = self._counters, status.counters
        return TopFrame(
            now_s,
            status.router_epoch,
            status.recovering,
            dict(status.committed),
            status.n_clients,
            sum(status.sessions.values()),
            status.n_queued,
            status.n_running,
            sum(each.slots for each in workers),
            total,
            list(status.updates),
            dict(status.troubled),
            dict(status.absent),
            {} if before is None else _grown(before, status.counters),
            rows,
        )

    def _row(
        self, worker: WorkerStatus, status: FleetStatus, gauges: Mapping[str, float], now_s: float
    ) -> TopRow:
        seen = self._look(worker, now_s)
        self._seen[worker.name] = seen
        is_still = worker.beat_age_ms > STILL_S * 1000
        committed = status.committed.get(worker.policy, worker.version)
        return TopRow(
            worker.name,
            worker.state,
            worker.policy,
            worker.engine,
            worker.version,
            max(0, committed - worker.version),
            worker.n_running,
            worker.slots,
            status.sessions.get(worker.name, 0),
            0.0 if is_still and seen.per_s is not None else seen.per_s,
            worker.n_tokens,
            worker.stalled_ms,
            seen.n_updates,
            worker.beat_age_ms,
            cache_used(gauges),
            dict(gauges),
            worker.problem or status.troubled.get(worker.name, ""),
            dict(worker.blocked_by),
        )

    def _look(self, worker: WorkerStatus, now_s: float) -> _Seen:
        boot = worker.epoch.partition(".")[0]
        heartbeat_s = now_s - worker.beat_age_ms / 1000
        known = self._seen.get(worker.name)
        if known is None or known.boot != boot or worker.n_tokens < known.n_tokens:
            return _Seen(boot, heartbeat_s, worker.n_tokens, None, worker.version, 0)
        n_updates = known.n_updates + (worker.version != known.version)
        passed_s = heartbeat_s - known.at_s
        if passed_s < MIN_APART_S:  # the same heartbeat: nothing is known since
            return known._replace(version=worker.version, n_updates=n_updates)
        per_s = (worker.n_tokens - known.n_tokens) / passed_s
        return _Seen(boot, heartbeat_s, worker.n_tokens, per_s, worker.version, n_updates)


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: n - before.get(name, 0) for name, n in now.items() if n > before.get(name, 0)}
